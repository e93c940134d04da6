"""The page of a study of scale: what it says and what it keeps quiet about; and in a real Chromium."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rush.errors import DataError
from rush.records.scaling import check_scale, read_scale
from rush.report.scaling import figures_of, headline, link_figures, scale_page, write_scale_report
from tests.report import made_up_scale
from tests.report.browser import Browser
from tests.report.test_report_browser import CONTRAST, OVERFLOWING

RECORDS = {
    "full": made_up_scale.scale,
    "hostile": made_up_scale.hostile_scale,
    "empty": made_up_scale.empty_scale,
}


def record_of(tree: dict[str, Any]) -> Any:
    check_scale(tree, "made up")
    return tree


def test_the_page_shows_what_is_a_finding_and_what_is_none() -> None:
    page = scale_page(record_of(made_up_scale.scale()))
    assert "On 4 devices ddp is the fastest that learns the same" in page
    assert page.count('class="roof ideal"') == 4, "speed and efficiency of both scalings"
    assert "What the planner" not in page
    assert "predicted 3.80k" in page
    for word in (
        "shared device",
        "out of memory",
        "unsupported",
        "different",
        "ZeRO-2 against ZeRO-3",
        "no peer-to-peer",
    ):
        assert word in page
    assert "12 all-gathers" in page


def test_a_winner_within_the_noise_is_not_called_one_without_saying_so() -> None:
    record = record_of(made_up_scale.scale())
    there = {
        p["layout"]: p["tokens_per_s"]
        for p in record["points"]
        if p["devices"] == 4 and p["verdict"] == "equal"
    }
    best, other = there["ddp"], there["zero3"]
    for ci95, level in [([best["ci95"][0] * 0.5, best["ci95"][0] * 0.9], False), (best["ci95"], True)]:
        other["ci95"] = ci95
        assert ("zero3" in headline(record).partition("Within the noise")[2]) == level


def test_what_is_no_finding_is_in_no_curve() -> None:
    record = record_of(made_up_scale.scale())
    speed, _ = figures_of(record, "strong")
    assert [line.name for line in speed.lines] == ["ddp", "zero3", "zero2", "zero3, no peer-to-peer"]
    assert [dot.x for dot in speed.lines[0].points] == [1.0, 2.0, 4.0]
    ideal = re.search(r'class="roof ideal" d="([^"]+)"', str(speed.picture))
    assert ideal is not None
    without = made_up_scale.scale()
    for point in without["points"]:
        point["predicted_tokens_per_s"] = None
    assert "predicted" not in scale_page(record_of(without)).split("<main", 1)[1].split("</main>", 1)[0]


def test_the_headline_of_a_study_without_findings_claims_none() -> None:
    assert "No layout on several devices" in headline(record_of(made_up_scale.empty_scale()))
    slow = made_up_scale.scale()
    slow["points"] = [point for point in slow["points"] if point["verdict"] not in ("equal", "shared device")]
    assert "No layout on several devices" in headline(record_of(slow))


def test_links_are_drawn_for_each_number_of_ranks_with_and_without_peers() -> None:
    figures = link_figures(made_up_scale.scale()["links"])
    assert [figure.title for figure in figures] == ["4 ranks over nccl", "4 ranks over nccl, no peer-to-peer"]
    assert [line.name for line in figures[0].lines] == ["all-reduce", "all-gather", "reduce-scatter", "send"]


def test_a_record_that_claims_a_speed_without_parity_is_refused(tmp_path: Path) -> None:
    tree = made_up_scale.scale()
    tree["points"][7]["efficiency"] = tree["points"][1]["efficiency"]
    with pytest.raises(DataError, match=r"points\[7\]: an efficiency stands beside the verdict 'different'"):
        check_scale(tree, "made up")
    tree = made_up_scale.scale()
    tree["points"][10]["tokens_per_s"] = tree["points"][1]["tokens_per_s"]
    with pytest.raises(DataError, match="ranks that share a device have no speed"):
        check_scale(tree, "made up")
    for change, said in (
        ({"format": 9}, "reads format 1"),
        ({"points": [{}]}, r"points\[0\]"),
        ({"devices": 3}, "devices is 3"),
    ):
        with pytest.raises(DataError, match=said):
            check_scale({**made_up_scale.scale(), **change}, "made up")
    with pytest.raises(DataError, match="`rush scale`"):
        read_scale(tmp_path)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, make in RECORDS.items():
        (folder / name).mkdir()
        (folder / name / "scale.json").write_text(json.dumps(make()))
        write_scale_report(folder / name, folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in RECORDS}


@pytest.mark.parametrize("name", RECORDS)
def test_the_page_opens_without_a_complaint_and_fits_every_width(
    name: str, browser: Browser, pages: dict[str, Path]
) -> None:
    page = browser.open(pages[name])
    assert page.complaints() == []
    assert page.requests() == [pages[name].resolve().as_uri()]
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    for width in (390, 768, 1280):
        page.resize(width, 900)
        assert page.evaluate(OVERFLOWING) == [], width
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    for dark in (False, True):
        page.prefer(dark=dark)
        seen, low = page.evaluate(CONTRAST)
        assert seen > 20
        assert low == []
    page.close()
