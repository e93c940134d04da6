"""Every sentence of the pages of a run, of compared runs and of documents, with data that would make it false."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rush.cli.compare import run_words
from rush.report.compare_runs import compare_runs, run_comparison_page, words_against
from rush.report.documents import documents_page
from rush.report.run_page import run_page
from rush.report.run_view import RunView, SampleView, headline, read_run, warnings
from rush.watch.catalog import Catalog
from tests.report.made_up_run import row_of, write_run


def said(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ").replace("\u202f", ",")


def _run(folder: Path, *rows: dict[str, Any], steps: int | None = None) -> RunView:
    """A run with these rows, each over the one made up for its step."""
    write_run(folder, rows=0 if rows else 10, steps=steps or max(1, len(rows)) if rows else steps or 10)
    whole = [{**row_of(at), **row} for at, row in enumerate(rows, start=1)]
    if rows:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in whole))
    return read_run(folder)


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("finished", "finished at step 10 of 10"),
        ("interrupted", "stopped at step 10 of 10"),
        ("failed", "failed after step 10 of 10"),
        ("running", "is running, at step 10 of 10"),
        ("stale", "has written nothing for a while, at step 10 of 10"),
    ],
)
def test_the_headline_says_where_the_run_stands_and_no_other_status(
    tmp_path: Path, status: Any, words: str
) -> None:
    run = replace(_run(tmp_path / "run"), status=status)
    assert f"tiny {words}: training loss " in said(headline(run))
    told = " ".join(warnings(run))
    assert ("stopped before its last step" in told) == (status == "interrupted")
    assert ("The run failed" in told) == (status == "failed")
    assert ("nothing was written for a while" in told) == (status == "stale")


def test_the_command_of_an_interrupted_run_can_be_typed(tmp_path: Path) -> None:
    run = replace(_run(tmp_path / "my run"), status="interrupted")
    (told,) = warnings(run)
    assert told.endswith("in the folder that holds this one: rush train --out 'my run' --resume")


def test_a_failure_names_its_phase_and_techniques_only_where_they_are_recorded(tmp_path: Path) -> None:
    run = replace(_run(tmp_path / "run"), status="failed")
    assert warnings(run)[0] == "The run failed (a step)."
    (run.folder / "failure.log").write_text("Traceback")
    assert warnings(run)[0] == "The run failed (a step); failure.log in its folder has the traceback."
    late = replace(run, failure={"phase": "step", "step": 7})
    assert "failed (step 7);" in warnings(late)[0]
    blamed = replace(run, failure={"phase": "save", "techniques": ["compile", 3]})
    assert "failed (save; on the stack: compile" in warnings(blamed)[0]


def test_a_run_that_diverged_is_told_so_and_that_no_traceback_is_anywhere(tmp_path: Path) -> None:
    run = replace(_run(tmp_path / "run"), status="failed")
    (told,) = warnings(replace(run, failure={"error": "Diverged", "phase": "step", "step": 2}))
    assert told.startswith("The run diverged at step 2: ")
    assert "failure.log" not in told
    (told,) = warnings(replace(run, failure={"error": "Drifted", "phase": "replicas", "step": 100}))
    assert "replicas held different weights" in told
    assert "at step 100" in told
    (told,) = warnings(replace(run, failure={"error": "CannotWrite", "phase": "save", "step": 5}))
    assert told == "The run failed (save, step 5)."


def test_losses_are_in_the_headline_only_where_they_were_recorded(tmp_path: Path) -> None:
    rows = [{"loss": None}] * 4
    assert said(headline(_run(tmp_path / "none", *rows))).endswith("step 4 of 4: no loss recorded.")
    validated = _run(tmp_path / "some", {}, {"val_loss": 3.25})
    assert "validation loss 3.2500, training loss" in headline(validated)
    assert "validation" not in headline(_run(tmp_path / "without", {}, {}))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{}, {"loss": None, "not_finite": ["loss"]}, {"not_finite": ["grad_norm"]}], "2 steps had a non-finite loss or gradient norm, the first at step 2"),
        ([{}, {"skipped": True}, {}], "1 update skipped"),
        ([{"data_s": 0.2}] * 3, "Steps waited for data 40"),
        ([{"val_loss": 2.0}, {"val_loss": 2.1}], "best at step 1 (2.0000) and rose to 2.1000"),
    ],
)  # fmt: skip
def test_a_warning_is_there_only_where_it_is_true(tmp_path: Path, rows: list[Any], words: str) -> None:
    assert words in said(" ".join(warnings(_run(tmp_path / "run", *rows))))
    quiet = [{"val_loss": 2.0}, {"val_loss": 2.03}, {"data_s": 0.04}]
    assert warnings(_run(tmp_path / "quiet", *quiet)) == []


def test_lines_that_are_no_rows_and_samples_that_were_cut_are_counted(tmp_path: Path) -> None:
    run = _run(tmp_path / "run")
    with open(tmp_path / "run/metrics.jsonl", "a") as file:
        file.write("no row\n")
    told = read_run(tmp_path / "run")
    assert "1 line of metrics.jsonl could not be read." in warnings(told)
    cut = replace(run, samples=(SampleView(1, "", "text", None), SampleView(2, "", None, "too long")))
    assert "1 sample cut or left out; the reason stands beside it." in warnings(cut)


def test_points_are_said_to_stand_for_steps_only_where_they_do(tmp_path: Path) -> None:
    words = "A point of the faint line stands for"
    assert words not in run_page(_run(tmp_path / "short"))
    write_run(tmp_path / "long", rows=1000)
    drawn = read_run(tmp_path / "long")
    assert f"{words} {drawn.series.width} steps" in run_page(drawn)


def test_the_ready_recipe_is_unchanged_only_where_nothing_was_changed(tmp_path: Path) -> None:
    run = _run(tmp_path / "run")
    ready = run.recipe
    assert "unchanged" in run_page(run, lambda name: ready)
    assert "with these differences" in run_page(run, lambda name: {**ready, "techniques": []})
    assert "There is no recipe.toml" in run_page(replace(run, recipe={}, recipe_text=""))


def _pair(tmp_path: Path, rates: tuple[float, float] = (1.0, 2.0)) -> list[Path]:
    return [write_run(tmp_path / name, rows=100, rate=rate) for name, rate in zip("ab", rates, strict=True)]


def test_sooner_and_later_are_what_the_times_say(tmp_path: Path) -> None:
    slow, fast = compare_runs(_pair(tmp_path)).runs
    assert words_against(slow, fast).endswith(" sooner")
    assert words_against(fast, slow).endswith(" later")
    assert words_against(slow, slow) == ""
    assert words_against(replace(slow, reached=None), fast) == ""


def test_recipes_are_the_same_only_where_both_can_be_read(tmp_path: Path) -> None:
    folders = _pair(tmp_path)
    found = compare_runs(folders)
    assert "None: all runs have the same recipe." in run_comparison_page(found)
    assert run_words(found)[-1].endswith("None: all runs have the same recipe.")
    for folder in folders:
        (folder / "recipe.toml").unlink()
    lost = compare_runs(folders)
    assert "Not known: there is no readable recipe.toml of A, B." in run_comparison_page(lost)
    assert "all runs have the same recipe" not in " ".join(run_words(lost))


def test_a_common_loss_is_said_to_be_reached_only_where_there_is_one(tmp_path: Path) -> None:
    folders = _pair(tmp_path)
    assert "which all of them reached" in run_comparison_page(compare_runs(folders))
    for folder in folders:
        rows = [
            {**json.loads(line), "loss": None} for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps({key: value for key, value in row.items() if key != "val_loss"}) + "\n" for row in rows))  # fmt: skip
    assert "which all of them reached" not in run_comparison_page(compare_runs(folders))


def _documents(**more: Any) -> dict[str, Any]:
    counts = {
        "rows": 10, "documents": 9, "tokens": 100, "trained": 50, "trained_share": 0.5, "histogram": [{"from": 1, "below": 16, "documents": 9}],
        "dropped": {}, "cut": 0, "cut_tokens": 0, "examples": {}, "unused": {}, "controls": {},
    }  # fmt: skip
    return {
        "source": "files", "template": "plain", "train_on": "assistant", "sequence": 128, "folder": "there", "held_out_note": None,
        "splits": {"train": {**counts, **more}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "Nothing was dropped, nothing was cut."),
        ({"dropped": {"empty": 3}}, '<td data-label="Reason">empty</td><td data-label="Rows">3</td>'),
        ({"cut": 2, "cut_tokens": 40}, "40 tokens lost"),
        ({"unused": {"id": 4}}, "Columns that were not used: id (4 rows)."),
        ({"controls": {"&lt;eos&gt;": 1}}, "Control tokens spelled out in turns:"),
    ],
)
def test_the_page_of_documents_says_what_was_left_out_and_only_that(more: Any, words: str) -> None:
    everything = (
        "Nothing was dropped",
        "<td>empty</td>",
        "tokens lost",
        "Columns that were not used",
        "Control tokens",
    )
    page = documents_page(_documents(**more), [])
    assert words in page
    others = [one for one in everything if one[:12] not in words and not (one == everything[0] and set(more) & {"unused", "controls"})]  # fmt: skip
    assert [one for one in others if one in page] == []


def test_an_old_record_is_judged_by_the_rule_of_now_in_the_list_of_rush_watch(tmp_path: Path) -> None:
    """As found: "no gain" beside ×1.22 (0.998 to 1.35), which means "cannot tell"."""
    gain = {"over": "base", "ratio": 1.22, "ci95": [0.998, 1.35], "real": False}
    for name, verdict in (("wide", {**gain}), ("tight", {**gain, "ratio": 1.0, "ci95": [0.99, 1.01]})):
        (tmp_path / name).mkdir()
        rung = {"name": "x", "verdict": "no gain", "gain": verdict, "tokens_per_s": {"median": 5.0}}
        (tmp_path / name / "ladder.json").write_text(json.dumps({"rungs": [rung]}))
    _, rows = Catalog([tmp_path]).rows()
    assert {row["name"]: row["table"]["rows"][0][-1] for row in rows} == {
        "wide": "cannot tell",
        "tight": "no gain",
    }
