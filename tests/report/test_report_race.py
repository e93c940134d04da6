"""The page of a race: what it says and what it keeps quiet about; and in a real Chromium."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rush.errors import DataError
from rush.records.race import check_race, read_race
from rush.report.race import race_html, race_page
from rush.report.race_words import gap_words, headline, more_words, warnings
from rush.report.redraw import page_of
from tests.report import made_up_race
from tests.report.browser import Browser
from tests.report.made_up_race import power_law, run
from tests.report.test_report_browser import CONTRAST, OVERFLOWING

RECORDS = {
    "full": made_up_race.race,
    "hostile": made_up_race.hostile_race,
    "unfinished": made_up_race.unfinished_race,
    "broken": made_up_race.broken_race,
    "empty": made_up_race.empty_race,
}
RESULT = Path(__file__).resolve().parents[2] / "results" / "race-tiny-x86"


def record_of(tree: dict[str, Any]) -> Any:
    check_race(tree, "made up")
    return tree


def test_the_page_says_gross_net_and_per_cent_of_steps() -> None:
    page = race_page(record_of(made_up_race.race()))
    assert "B reaches a validation loss of" in page
    assert "sooner than A" in page
    assert "gross ×1.5" in page
    assert "% more tokens" in page
    for title in (
        "Gross and net",
        "To the same loss, at several depths",
        "The gap at equal tokens",
        "where the time went",
    ):
        assert title in page
    assert page.count('class="curve-picture"') == 6, (
        "loss over tokens and over time, and the gap, wide and narrow"
    )


def test_one_seed_is_called_one_seed() -> None:
    record = record_of(made_up_race.race([run("A", 1, power_law(), 0.3), run("B", 1, power_law(1.2), 0.2)]))
    assert headline(record).startswith("With one seed, which has no interval, B reaches")
    assert any("One seed has no interval" in said for said in warnings(record))
    assert "sooner than" not in race_page(record)


def test_an_unfinished_race_is_drawn_as_far_as_it_came() -> None:
    page = race_page(record_of(made_up_race.unfinished_race()))
    assert "This race is not finished" in page
    assert "Validation loss" in page
    assert "Nothing can be compared yet" in race_page(record_of(made_up_race.empty_race()))


def test_what_diverged_or_failed_is_said_with_its_reason() -> None:
    page = race_page(record_of(made_up_race.broken_race()))
    assert "B diverged with seed 1: the loss is NaN at step 12." in page
    assert "C failed with seed 1" in page


def test_per_cent_of_steps_in_words() -> None:
    assert more_words({"ratio": 1.041, "ci95": [1.02, 1.063], "samples": [1.041]}) == "4.1\N{NO-BREAK SPACE}% more tokens (2.0 to 6.3)"  # fmt: skip
    assert (
        more_words({"ratio": 0.97, "ci95": None, "samples": [0.97]}) == "3.0\N{NO-BREAK SPACE}% fewer tokens"
    )
    assert more_words({"ratio": 0.97, "ci95": [0.96, 1.01], "samples": [0.97]}).endswith("(−1.0 to 4.0)")
    assert more_words({"ratio": 1.0, "ci95": [1.0, 1.0], "samples": [1.0]}) == "the same tokens"
    assert (
        more_words({"ratio": 1.0, "ci95": [0.97, 1.04], "samples": [1.0]}) == "the same tokens (−3.0 to 4.0)"
    )
    assert (
        gap_words({"gap": -1e-6, "ci95": [-2e-6, 0.0], "relative": -1e-7, "samples": []})
        == "+0.0000 (+0.0000 to +0.0000), +0.00\N{NO-BREAK SPACE}%"
    )


def test_a_notebook_and_the_committed_race_show_themselves(tmp_path: Path) -> None:
    assert "net ×" in race_html(read_race(RESULT))
    assert page_of(RESULT) == (RESULT / "report.html").read_text(), (
        "drawn again from its record: the same page"
    )
    with pytest.raises(DataError, match=r"there is no race at .*; give a folder that `rush race` wrote"):
        read_race(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tree: tree.pop("contenders"), "contenders is missing"),
        (lambda tree: tree["runs"][0].update(status="won"), "allowed: waiting, running, ok"),
        (
            lambda tree: tree["runs"][0]["step_s"].pop(),
            "its legs end at step 40, with 40 losses and 39 times",
        ),
        (lambda tree: tree["runs"][0]["legs"][1].update(first=9), "follows step 10"),
        (lambda tree: tree["runs"][0]["validations"][0].update(step=99), "validations are not in order"),
    ],
)
def test_a_damaged_record_is_refused_in_one_sentence(change: Any, said: str, tmp_path: Path) -> None:
    tree = made_up_race.race()
    change(tree)
    (tmp_path / "race.json").write_text(json.dumps(tree))
    with pytest.raises(DataError, match=said):
        page_of(tmp_path)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("full", "hostile") else [pytest.mark.slow]) for name in RECORDS],
)
def test_the_page_opens_without_a_complaint_and_fits_every_width(
    name: str, browser: Browser, tmp_path: Path
) -> None:
    (html := tmp_path / "report.html").write_text(race_page(record_of(RECORDS[name]())), encoding="utf-8")
    page = browser.open(html)
    assert page.complaints() == []
    assert page.requests() == [html.resolve().as_uri()]
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    for width in (360, 1280):
        page.resize(width, 900)
        assert page.evaluate(OVERFLOWING) == [], width
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    for dark in (False, True):
        page.prefer(dark=dark)
        seen, low = page.evaluate(CONTRAST)
        assert seen > 20
        assert low == []
    page.close()
