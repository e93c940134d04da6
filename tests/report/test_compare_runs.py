"""Runs side by side: tokens and time to the same loss, differences, the terminal's table, the page."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rush.cli import main
from rush.errors import RecipeError
from rush.report.compare_runs import compare_runs, run_comparison_page
from tests.explain import made_up as explanations
from tests.report import made_up
from tests.report.browser import Browser
from tests.report.made_up_run import write_run

ATTACK = "<script>alert(1)</script>"


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """The second learns twice as fast per step."""
    return [write_run(tmp_path / "slow", rows=100), write_run(tmp_path / "fast", rows=100, rate=2.0, lr=5e-3)]


def test_the_common_loss_is_the_worst_final_validation_and_is_reached_at_the_first_validation_below(
    runs: list[Path],
) -> None:
    found = compare_runs(runs)
    assert found.validated
    assert found.target == pytest.approx(2.1 + 5.0 * math.exp(-100 / 60))
    slow, fast = found.runs
    assert slow.reached == (100, 204_800.0, 50.0)
    assert fast.reached == (50, 102_400.0, 25.0)  # exp(-2·50/60) is the same loss


def test_without_validations_the_smoothed_training_loss_is_compared(tmp_path: Path, runs: list[Path]) -> None:
    bare = write_run(tmp_path / "bare", rows=20)
    found = compare_runs([runs[1], bare])
    assert not found.validated
    assert "smoothed training loss" in found.what
    assert found.runs[1].reached is not None
    assert found.runs[1].reached[0] <= 20
    assert found.runs[0].reached is not None
    assert 5 <= found.runs[0].reached[0] <= 12  # about half as many steps


def test_only_what_differs_is_a_difference(runs: list[Path]) -> None:
    assert compare_runs(runs).differences == (("optimizer.lr", ("0.002", "0.005")),)
    assert compare_runs([runs[0], runs[0]]).differences == ()


def test_runs_on_other_data_are_said_to_be_hard_to_compare(runs: list[Path]) -> None:
    with open(runs[0] / "recipe.toml", "a") as file:
        file.write('[data]\nsource = "files"\n')
    assert "data.source" in compare_runs(runs).notes[0]


def run_command(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(list(words))
    return int(left.value.code or 0)


def test_the_terminal_shows_one_table_of_eighty_columns(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    long = write_run(tmp_path / ("a-very-long-name-of-a-run-" * 4), rows=60)
    page = tmp_path / "page.html"
    assert run_command("compare", *map(str, [*runs, long]), "--out", str(page)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if not line.startswith(("Next: ", "Report: "))) <= 80
    assert lines[1].split()[:2] == ["A", "slow"]
    assert lines[2].split()[:2] == ["B", "fast"]
    assert lines[2].rstrip().endswith("2.00×")
    assert any(line.startswith("  optimizer.lr: A 0.002 · B 0.005") for line in lines)
    assert page.read_text().count("<script>") == 1


def test_json_has_the_numbers(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("compare", *map(str, runs), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["runs"]["B"]["to_same_loss"]["seconds"] == 25.0
    assert found["differences"]["optimizer.lr"] == {"A": "0.002", "B": "0.005"}


def test_mixed_kinds_are_one_sentence(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_up.write(tmp_path / "ladder", made_up.made_up_ladder())
    assert run_command("compare", str(runs[0]), str(tmp_path / "ladder")) == 2
    said = capsys.readouterr().err
    assert "takes runs and races, or ladders, and not both" in said
    assert "(ladder)" in said
    with pytest.raises(RecipeError, match="at least two"):
        compare_runs(runs[:1])


def test_every_kind_of_folder_is_drawn_again(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ladder = made_up.made_up_ladder()
    ladder["finished"] = None
    made_up.write(tmp_path / "ladder", ladder)
    assert run_command("report", str(runs[0]), str(tmp_path / "ladder")) == 0
    assert capsys.readouterr().out.splitlines()[:-1] == [
        str(runs[0] / "report.html"),
        str(tmp_path / "ladder" / "report.html"),
    ]
    assert "This ladder is not finished" in (tmp_path / "ladder" / "report.html").read_text()
    (tmp_path / "why").mkdir()
    record = explanations.record("memory", explanations.memory())
    (tmp_path / "why" / "explain.json").write_text(json.dumps(record))
    assert (
        run_command("report", str(tmp_path), str(tmp_path / "why")) == 3
    )  # the other one is drawn all the same
    assert "holds no record" in capsys.readouterr().err
    assert "<svg" in (tmp_path / "why" / "report.html").read_text()
    assert run_command("report", *map(str, runs), "--out", "x.html") == 2


RESULTS = Path(__file__).resolve().parent.parent.parent / "results"


@pytest.mark.parametrize(
    "folder", ["scale-h200", "tune-tiny-n1", "models-qlora-h200", "kernels-nf4-rope-h200"]
)
def test_recorded_results_are_drawn_again(folder: str, tmp_path: Path) -> None:
    assert run_command("report", str(RESULTS / folder), "--out", str(tmp_path / "page.html")) == 0
    assert "<h1" in (tmp_path / "page.html").read_text()


def test_the_page_shows_the_runs_on_top_of_each_other(
    browser: Browser, runs: list[Path], tmp_path: Path
) -> None:
    runs.append(write_run(tmp_path / "<script>alert(0)<", rows=60, lr=1e-3))
    html = tmp_path / "page.html"
    html.write_text(run_comparison_page(compare_runs(runs)))
    page = browser.open(html, width=390)
    assert page.complaints() == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    visible = "[...document.querySelectorAll('.as-{} .narrow path.curve')].filter(e => e.getClientRects().length).length"
    assert page.evaluate(visible.format("steps")) == 4 * 3  # two panels: line and legend of each run
    page.click("button[data-show=time]")
    assert page.evaluate(visible.format("time")) == 4 * 3
    assert page.evaluate(visible.format("steps")) == 0
    assert page.requests() == [html.as_uri()]
    page.close()
