"""Races beside each other and beside runs: one table, with gross and net of every contender."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from rush.cli import main
from rush.report.compare_runs import compare_runs, run_comparison_page
from tests.report import made_up_race
from tests.report.browser import Browser
from tests.report.made_up_race import power_law, run
from tests.report.made_up_run import write_run
from tests.report.test_report_browser import OVERFLOWING

RECIPE = (
    'about = "made up"\n[data]\nsource = "python-stdlib"\n[schedule]\nsteps = 9\n[optimizer]\nlr = {lr}\n'
)


def write_race(folder: Path, record: dict[str, Any]) -> Path:
    folder.mkdir()
    for place, one in enumerate(record["contenders"]):
        one["recipe"] = RECIPE.format(lr=0.1 * (place + 1))
    (folder / "race.json").write_text(json.dumps(record))
    return folder


@pytest.fixture
def races(tmp_path: Path) -> list[Path]:
    """The first has a contender that is sooner; the second one that diverged."""
    return [
        write_race(tmp_path / "first", made_up_race.race()),
        write_race(tmp_path / "second", made_up_race.broken_race()),
    ]


def test_a_race_alone_is_compared_with_its_gross_and_net(races: list[Path]) -> None:
    found = compare_runs(races[:1])
    first, second = found.runs
    assert [one.run.name for one in found.runs] == ["first/A tiny a=1", "first/B tiny b=1"]
    assert second.of_race("gross").startswith("×1.5")
    assert second.of_race("net").endswith("of A")
    assert (first.of_race("net"), first.verdict, second.verdict) == ("", "", "sooner")
    curve = [
        sum(power_law(1.2 + 0.015 * number)(tokens) for number in range(3)) / 3
        for tokens in range(2000, 40001, 2000)
    ]
    assert [one.loss for one in second.run.series.validations] == pytest.approx(curve), "the mean over seeds"
    assert found.target == pytest.approx(curve[-1])
    assert second.row["seconds"] == pytest.approx(40 * 0.2), (
        "without what the first step of a leg took for warm-up"
    )
    assert first.row["tokens_per_s"] == pytest.approx(1000 / 0.3)
    assert dict(found.differences) == {"optimizer.lr": ("0.1", "0.2")}
    assert found.runs[0].run.steps == 40, "the race's steps, not the recipe's"


def test_races_and_runs_share_letters_losses_and_a_page(races: list[Path], tmp_path: Path) -> None:
    alone = write_run(tmp_path / "alone", rows=100)
    found = compare_runs([*races, alone])
    assert [(one.letter, one.run.status) for one in found.runs] == [
        ("A", "finished"), ("B", "finished"), ("C", "finished"), ("D", "failed"), ("E", "finished"),
    ]  # fmt: skip
    assert found.runs[1].of_race("gross").endswith("of A")
    assert found.runs[3].of_race("gross") == ""
    reached = [one.reached for one in found.runs]
    assert all(place is None or place[1] > 0 for place in reached)
    assert any("Only contenders of one race took turns" in note for note in found.notes)
    assert any("run.validate_sequences" in note for note in found.notes)
    page = run_comparison_page(found)
    for said in ("first/B tiny b=1", "second/B tiny b=1", "alone", ">gross<", ">net<", "sooner"):
        assert said in page
    assert "×1.5" in page
    assert ">gross<" not in run_comparison_page(compare_runs([alone, alone]))


def test_a_growing_batch_counts_its_own_tokens(tmp_path: Path) -> None:
    grown = [run(letter, 1, power_law(), 0.4) for letter in "AB"]
    grown[1]["tokens"] = [500] * 20 + [1000] * 20
    found = compare_runs([write_race(tmp_path / "grown", made_up_race.race(grown))])
    assert [one.run.series.tokens for one in found.runs] == [40_000, 30_000]


def test_the_terminal_and_json_have_gross_and_net(
    races: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert _rush("compare", *map(str, races), "--out", str(tmp_path / "page.html")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if not line.startswith(("Next: ", "Report: "))) <= 80
    assert lines[:2] == ["A first/A tiny a=1", "B first/B tiny b=1"]
    assert any(line.split()[-3:] == ["gross", "net", "verdict"] for line in lines)
    assert any(line.startswith("B ") and line.split()[-1] == "sooner" for line in lines)
    assert (tmp_path / "page.html").is_file()
    assert _rush("compare", str(races[0]), "--json") == 0
    row = json.loads(capsys.readouterr().out)["runs"]["B"]
    assert row["race"]["verdict"] == "sooner"
    assert math.isclose(row["race"]["gross"]["ratio"], 1.5, rel_tol=1e-3)
    assert row["race"]["seeds"] == 3


def test_a_race_in_which_nothing_was_trained_is_no_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_race(tmp_path / "empty", made_up_race.empty_race())
    assert _rush("compare", str(folder)) == 2
    assert "at least two runs, or contenders that made a step; 0 given" in capsys.readouterr().err


def test_the_page_opens_without_a_complaint_and_fits_a_phone(
    browser: Browser, races: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "hostile").mkdir()
    (tmp_path / "hostile" / "race.json").write_text(json.dumps(made_up_race.hostile_race()))
    (html := tmp_path / "page.html").write_text(
        run_comparison_page(compare_runs([*races, tmp_path / "hostile"]))
    )
    page = browser.open(html, width=390)
    assert page.complaints() == []
    assert page.evaluate(OVERFLOWING) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.requests() == [html.resolve().as_uri()]
    page.close()


def _rush(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(words))
    return int(left.value.code or 0)
