"""Every topic measured for real on this CPU, quickly: the record, the words, the page and the picture made from it."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rush.errors import DataError, RecipeError
from rush.explain import ExplainSettings, find, topics, units
from rush.explain.page import page, picture, write
from rush.explain.records import explain, make, read
from rush.hardware import Device, probe
from rush.report.panel_svg import draw
from tests.explain import made_up

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
NAMES = (
    "attention",
    "batch",
    "cpu-gpu",
    "flash-attention",
    "fusion",
    "links",
    "memory",
    "occupancy",
    "precision",
    "roofline",
)
MEASURED = [
    pytest.param(name, marks=() if name in ("attention", "memory", "roofline") else pytest.mark.slow)
    for name in NAMES
]
"""The others take longer; `links` starts two processes, each of which imports torch."""
SVG = "{http://www.w3.org/2000/svg}"


@cache
def measured(name: str) -> dict[str, Any]:
    """A real, quick measurement; once for all tests of a process."""
    reported: list[tuple[str, int, int]] = []
    record = make(
        find(name),
        ExplainSettings(probe("cpu"), "cpu", quick=True, progress=lambda *seen: reported.append(seen)),
    )
    assert reported, "progress is reported"
    assert all(done < total for _, done, total in reported)
    return record


def test_the_registry_finds_every_topic_and_needs_no_torch() -> None:
    assert tuple(sorted(topics())) == NAMES
    code = "import sys; from rush.explain import topics; topics(); raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("name", MEASURED)
def test_a_quick_measurement_explains_itself(name: str) -> None:
    found = explain(measured(name))
    assert 3 <= len(found.words) <= 6, found.words
    assert found.record["device"] == "cpu"
    assert found.record["seconds"] < 60
    assert "quick" in found.where
    for width in (1040, 350):
        assert all(draw(panel, width).marks for panel in found.panels)


@pytest.mark.slow
def test_the_words_contain_the_numbers_of_the_record() -> None:
    def text(name: str) -> str:
        return " ".join(explain(measured(name)).words)

    def data(name: str) -> Any:
        return measured(name)["data"]

    for way in ("plain", "flash"):
        row = [r for r in data("attention")["rows"] if r["way"] == way][-1]
        assert units.duration(row["seconds"]["median"]) in text("attention")
        assert units.size(row["peak_bytes"]) in text("attention")
    for row in (data("memory")["bandwidth"][0], data("memory")["bandwidth"][-1]):
        assert units.bandwidth(row["moved"] / row["seconds"]["median"]) in text("memory")
    for row in data("memory")["latency"][:1] + data("memory")["latency"][-1:]:
        assert units.duration(row["seconds"]["median"]) in text("memory")
    separate = [r for r in data("fusion")["rows"] if r["way"] == "separate"][-1]
    assert units.duration(separate["seconds"]["median"]) in text("fusion")
    first = data("batch")["rows"][0]
    assert units.flops(2 * 512 * 1024 / first["seconds"]["median"]) in text("batch")
    assert units.flops(data("roofline")["matmul_flops"]) in text("roofline")
    assert units.bandwidth(data("roofline")["copy_bytes_per_s"]) in text("roofline")
    assert "256 in bf16" in text("precision")
    one = data("cpu-gpu")["host_chains"][0]
    assert units.duration(one["seconds"]["median"] / one["rounds"]) in text("cpu-gpu")
    second = [r for r in data("flash-attention")["rows"] if r["way"] == "second"][-1]
    assert units.duration(second["seconds"]["median"]) in text("flash-attention")
    full = next(r for r in data("occupancy")["tasks"] if r["tasks"] == data("occupancy")["workers"])
    assert units.duration(full["seconds"]["median"]) in text("occupancy")


def test_the_measured_shapes_are_the_recipes() -> None:
    record = make(find("roofline"), ExplainSettings(probe("cpu"), "cpu", quick=True, options={"model": "llama-tiny", "batch": 2, "sequence": 64}))  # fmt: skip
    data = record["data"]
    assert (data["model"], data["batch"], data["sequence"]) == ("llama-tiny", 2, 64)
    ops = {op["name"]: op for op in data["ops"]}
    assert {"q", "k", "v", "attention_out", "mlp_gate", "mlp_up", "mlp_down", "head", "plain attention",
            "flash attention", "norm", "activation", "loss", "optimizer"} == set(ops)  # fmt: skip
    assert ops["mlp_up"]["flops"] == 2 * (2 * 64) * 128 * 352
    assert ops["mlp_up"]["bytes"] == 4 * (128 * 128 + 128 * 352 + 128 * 352)
    assert ops["norm"]["copies"] == 9
    assert ops["plain attention"]["flops"] == 2 * ops["flash attention"]["flops"] == 4 * 2 * 4 * 64 * 64 * 32


def test_a_sequence_longer_than_the_model_reads_is_refused() -> None:
    with pytest.raises(RecipeError, match="256 tokens"):
        find("roofline").measure(ExplainSettings(probe("cpu"), "cpu", options={"sequence": 100_000}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "llama-3.1-8b"}, "take about"),
        ({"model": "llama-3.1-8b", "batch": 1, "sequence": 1}, "need about"),
    ],
)
def test_what_would_take_minutes_or_does_not_fit_is_refused_beforehand(
    changes: dict[str, str | int], reason: str
) -> None:
    small = replace(probe("cpu"), devices=(Device("small", 2**33),))
    with pytest.raises(RecipeError, match=f"{reason} .*use a smaller --batch"):
        find("roofline").measure(ExplainSettings(small, "cpu", quick=True, options=changes))


def test_fusion_compiles_or_reports_why_not_and_computes_the_chain() -> None:
    data = measured("fusion")["data"]
    assert data["agrees"] is True
    fused = [row for row in data["rows"] if row["way"] == "fused"]
    assert bool(fused) != bool(data["missing"])


@pytest.mark.parametrize("name", MEASURED)
def test_a_record_goes_through_its_file_unchanged_and_draws_the_same_bytes(name: str, tmp_path: Path) -> None:
    found = explain(measured(name))
    paths = write(found, tmp_path / "new" / "folder")
    assert read(paths["record"]) == found.record
    again = explain(read(paths["record"]))
    assert again.words == found.words
    assert page(again) == paths["report"].read_text(encoding="utf-8")
    root = ET.fromstring(paths["picture"].read_text(encoding="utf-8"))
    assert root.tag == f"{SVG}svg"
    allowed = {
        f"{SVG}{tag}" for tag in ("svg", "style", "rect", "text", "line", "g", "path", "circle", "title")
    }
    assert {element.tag for element in root.iter()} <= allowed


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_is_to_scale_and_nothing_leaves_it(name: str) -> None:
    root = ET.fromstring(picture(explain(made_up.record(name, made_up.EVERY[name]()))))
    width, height = float(root.get("width", "nan")), float(root.get("height", "nan"))
    for group in root.iter(f"{SVG}g"):
        if not (place := group.get("transform")):
            continue
        top = float(place.split()[1].rstrip(")"))
        for text in group.iter(f"{SVG}text"):
            assert -0.5 <= float(text.get("x", "nan")) <= width - 24
            assert 0 <= top + float(text.get("y", "nan")) <= height


def test_bars_are_as_long_as_their_numbers() -> None:
    from rush.report.panels import Bar, Bars

    drawn = draw(Bars("b", "s", [Bar("one", 1.0), Bar("three", 3.0), Bar("none", None, note="why")]), 1040)
    widths = [float(str(mark).split('width="')[1].split('"')[0]) for mark in drawn.marks if "<rect" in mark]
    assert widths[1] == pytest.approx(3 * widths[0], rel=0.01)
    assert len(widths) == 2
    assert "why" in "".join(drawn.marks)


def test_points_are_drawn_at_their_numbers() -> None:
    from rush.report.panels import Curve, Curves, Dot

    panel = Curves("t", "x", "y", "", "", [Curve("l", [Dot(1, 10), Dot(10, 100), Dot(100, 1000)], 1)])
    marks = [
        str(mark) for mark in draw(panel, 1040).marks if 'class="dot series-1"' in mark and "<title" in mark
    ]
    places = [
        (float(m.split('cx="')[1].split('"')[0]), float(m.split('cy="')[1].split('"')[0])) for m in marks
    ]
    assert len(places) == 3
    assert places[1][0] - places[0][0] == pytest.approx(places[2][0] - places[1][0], abs=0.05)
    assert places[0][1] - places[1][1] == pytest.approx(places[1][1] - places[2][1], abs=0.05)
    assert places[0][1] > places[2][1]


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", "null", "{", '{"format": "rush explain", "version": 2}', "\x00", "[" * 100_000,
        json.dumps(made_up.record("attention", {})), json.dumps(made_up.record("attention", {"rows": 3})),
        json.dumps(made_up.record("memory", made_up.attention())),
        json.dumps(made_up.record("batch", {**made_up.batch(), "read_bytes_per_s": 0})),
        json.dumps(made_up.record("batch", {**made_up.batch(), "read_bytes_per_s": 1e99})),
        json.dumps(made_up.record("batch", made_up.batch())).replace("20000000000.0", "NaN"),
        json.dumps(made_up.record("batch", made_up.batch(), machine={})),
        json.dumps(made_up.record("batch", made_up.batch(), load="much")),
        json.dumps({**made_up.record("batch", {}), "data": []}),
    ],
)  # fmt: skip
def test_a_file_that_is_no_record_ends_in_one_sentence(content: str, tmp_path: Path) -> None:
    path = tmp_path / "explain.json"
    path.write_text(content)
    with pytest.raises(DataError) as error:
        explain(read(path))
    assert "\n" not in str(error.value)


def test_a_record_of_an_unknown_topic_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match="did you mean 'attention'"):
        explain(made_up.record("atention", made_up.attention()))


def test_a_busy_machine_is_reported() -> None:
    record = made_up.record("batch", made_up.batch(), load=1.8)
    assert "Other programs were computing" in page(explain(record))
    assert "Other programs" not in page(explain(made_up.record("batch", made_up.batch())))


def test_the_docs_are_what_the_tool_draws_from_their_records() -> None:
    from scripts.explain_pages import DOCS, pages

    found = pages(DOCS)
    assert {f"{name}.md" for name in NAMES} < set(found)
    for name, content in found.items():
        assert (DOCS / name).read_text(encoding="utf-8") == content, f"{name}: run scripts/explain_pages.py"
