"""The pages of the benches: true to the record, to scale, harmless, and whole in a real browser."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from rush.errors import DataError
from rush.records.kernels import check_kernels, read_kernels
from rush.records.models import check_models
from rush.report import formatting
from rush.report.kernels import kernel_page, part_of, write_kernel_report
from rush.report.models import model_page, table
from tests.report import made_up_benches as made
from tests.report.browser import Browser
from tests.report.test_report_browser import CONTRAST, OVERFLOWING


def page_of(record: dict[str, Any]) -> str:
    return kernel_page(record) if "ops" in record else model_page(record)  # type: ignore[arg-type]


def test_every_target_and_number_is_on_the_page() -> None:
    text = page_of(made.kernels())
    for word in ("4 of 8 targets reached, 2 not measured", "at least 1× as fast as Liger", "×1.10 (1.05 to 1.15)", "Liger: not installed",
                 "the process died of SIGSEGV", "flash-attn: flash_attn is not installed", "OutOfMemoryError: 20 GiB"):  # fmt: skip
        assert word in text, word
    for row in made.op("rmsnorm")["rows"]:
        if row["time_ms"]:
            assert formatting.digits(row["time_ms"]["median"]) in text


def test_a_wrong_result_is_reported_at_the_top() -> None:
    text = page_of(made.kernels())
    top = text[: text.index('id="targets"')]
    assert "Not equal to the reference:" in top
    assert "plain torch (rope, 16k × 2048)" in top
    assert "Not equal" not in page_of(made.interpreted_kernels())


def test_interpreted_kernels_are_never_shown_with_a_speed() -> None:
    text = page_of(made.interpreted_kernels())
    assert "says nothing about their speed" in text
    assert "interpreted: not a speed" in text
    (part,) = [part_of(op) for op in made.interpreted_kernels()["ops"]]
    assert all(line.name != "rush" for figure in part.figures for line in figure.lines)


def test_points_are_where_the_numbers_put_them() -> None:
    part = part_of(made.op("rmsnorm"))  # type: ignore[arg-type]
    assert [figure.title for figure in part.figures] == ["forward", "forward and backward"]
    root = ET.fromstring(str(part.figures[1].picture))
    ticks = {
        float(text.replace("%", "")) / 100: float(e.get("y", "nan")) - 4
        for e in root.iter("text")
        if e.get("class") == "tick" and (text := "".join(e.itertext()).strip()).endswith("%")
    }
    (low, at_low), (high, at_high) = min(ticks.items()), max(ticks.items())
    dots = [e for e in root.iter("circle") if "ours" in (e.get("class") or "")]
    assert len(dots) == 3
    for dot in dots:
        found = low + (float(dot.get("cy", "nan")) - at_low) / (at_high - at_low) * (high - low)
        assert found == pytest.approx(0.9, abs=0.005)
    xs = [float(dot.get("cx", "nan")) for dot in dots]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.1), "sizes that double are evenly spaced"


def test_a_series_gets_a_picture_of_its_own() -> None:
    op = made.op("flash_attention")
    for row in op["rows"]:
        row["series"] = "head dim 64" if row["dims"]["columns"] < 8000 else "head dim 128"
    titles = [figure.title for figure in part_of(op).figures]  # type: ignore[arg-type]
    assert titles == ["forward, head dim 64", "forward and backward, head dim 64", "forward, head dim 128",
                      "forward and backward, head dim 128"]  # fmt: skip


@pytest.mark.parametrize("record", [made.hostile_kernels(), made.hostile_models()], ids=["kernels", "models"])
def test_text_from_a_record_stays_text(record: dict[str, Any]) -> None:
    text = page_of(record)
    assert "<img" not in text
    assert "{{7*7}}" in text  # and not 49
    assert len(re.findall(r"<script", text)) == 1
    assert "style=" not in text.split("</style>", 1)[1]


def test_the_models_page_shows_both_sides_and_the_target() -> None:
    text = page_of(made.models())
    for word in ("1 of 3 targets reached", "nanoGPT&#39;s setting", "gpt2-124m-fast", "at least ×1.20 wanted",
                 "1.2× is less than 1.35×", "it died", "Parity with plain fp32: equal over 10 steps"):  # fmt: skip
        assert word in text, word
    rows = table(made.models())  # type: ignore[arg-type]
    assert rows[0][3] == "1.250× (1.240 to 1.260)"
    assert rows[0][-1] == "reached"


def test_memory_has_a_verdict_of_its_own_and_lengths_are_a_table() -> None:
    text = page_of(made.finetuning())
    for word in ("2 of 2 targets reached", "memory: at most ×0.9 wanted; found ×0.85", "1.100× is more than 0.9×",
                 "measured beside", "Parity with plain fp32 with lora: equal over 8 steps", "trained: 42 float32",
                 "150,528 tokens ran in 80 GB at 2,100 tokens/s; 158,720 did not fit", "342,733 tokens (somebody)",
                 "out of memory", "PEFT</strong>: 41 s, build 6 s, timing 20 s"):  # fmt: skip
        assert word in text, word
    rows = table(made.finetuning())  # type: ignore[arg-type]
    assert [row[4] for row in rows] == ["≥ 1.15×, memory ≤ 0.9×"] * 2
    assert [row[-1] for row in rows] == ["reached; memory reached", "reached; memory missed"]
    assert "0.850×" in rows[0][5]
    assert "(beside it)" in rows[1][2]


def test_the_same_record_gives_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "kernels.json").write_text(json.dumps(made.kernels()))
    pages = []
    for name in ("a.html", "b.html"):
        write_kernel_report(tmp_path, tmp_path / name)
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]


# The records.


def test_the_made_up_records_are_valid() -> None:
    for record in (made.kernels(), made.interpreted_kernels(), made.hostile_kernels()):
        check_kernels(record, "here")
    for record in (made.models(), made.hostile_models()):
        check_models(record, "here")


def test_a_time_without_a_check_of_the_result_is_refused() -> None:
    record = made.kernels()
    record["ops"][0]["rows"][0]["correctness"] = None
    with pytest.raises(DataError, match="a time without a check"):
        check_kernels(record, "here")


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("status",), "fine", "status is 'fine'"),
        (("time_ms",), None, "time_ms"),
        (("time_ms", "ci95"), [2.0, 3.0], "outside its interval"),
        (("time_ms", "samples"), [], "at least 1 item"),
        (("time_ms", "samples"), [0.0], "greater than 0"),
        (("kind",), "friend", "kind is 'friend'"),
        (("correctness", "verdict"), "good", "verdict is 'good'"),
    ],
)
def test_a_damaged_row_is_named(place: tuple[str, ...], value: Any, words: str) -> None:
    record = made.kernels()
    node = record["ops"][0]["rows"][0]
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    with pytest.raises(DataError, match=words):
        check_kernels(record, "here")


def test_what_is_no_bench_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="rush bench kernels"):
        read_kernels(tmp_path)
    (tmp_path / "kernels.json").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        read_kernels(tmp_path)
    (tmp_path / "kernels.json").write_text('{"format": 7}')
    with pytest.raises(DataError, match="format is 7"):
        read_kernels(tmp_path)


def test_ops_of_older_records_have_todays_names(tmp_path: Path) -> None:
    record = made.kernels()
    record["ops"][0]["op"] = "norm_of_all"
    (tmp_path / "kernels.json").write_text(json.dumps(record))
    assert read_kernels(tmp_path)["ops"][0]["op"] == "grad_norm"
    older = read_kernels(Path("results/kernels-h200"))["ops"]
    assert "biased" not in str([op["op"] for op in older])
    assert {row["kind"] for op in older for row in op["rows"]} == {"ours", "plain", "compiled", "baseline"}


def test_ours_without_a_target_is_refused() -> None:
    record = made.models()
    del record["workloads"][0]["ours"][0]["target"]
    with pytest.raises(DataError, match="target is missing"):
        check_models(record, "here")


# In a real browser.

PAGES = ("kernels", "interpreted", "hostile", "models", "hostile-models", "finetuning")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    records = dict(zip(PAGES, (made.kernels(), made.interpreted_kernels(), made.hostile_kernels(), made.models(),
                               made.hostile_models(), made.finetuning()), strict=True))  # fmt: skip
    for name, record in records.items():
        (folder / f"{name}.html").write_text(page_of(record), encoding="utf-8")
    return {name: folder / f"{name}.html" for name in PAGES}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_without_a_complaint_and_nothing_sticks_out(
    name: str, browser: Browser, pages: dict[str, Path]
) -> None:
    for width in (320, 768, 1280):
        page = browser.open(pages[name], width=width, height=800)
        page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        assert page.complaints() == []
        assert page.requests() == [pages[name].resolve().as_uri()]
        assert page.evaluate(OVERFLOWING) == [], width
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.close()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["kernels", "models"])
def test_every_text_has_enough_contrast(
    name: str, dark: bool, browser: Browser, pages: dict[str, Path]
) -> None:
    page = browser.open(pages[name], dark=dark)
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    seen, low = page.evaluate(CONTRAST)
    assert seen > 30
    assert low == []
    page.close()
