"""The run from start to end: what is recorded, and what a resumed run does with what it finds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rush.errors import DataError, RecipeError
from rush.recipe import Recipe
from rush.recipe_io import changed, load_recipe
from rush.training.loop import Summary, train_recipe
from rush.training.schedule import learning_rate
from rush.training.step import LaunchedStep
from rush.training.view import Tokens
from tests.fresh_cache import fresh_cache
from tests.training.small_runs import checkpoint_files, rows, small_recipe, write_corpus


class Listener:
    """A view that remembers what a person would have seen."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.rows: list[Mapping[str, Any]] = []
        self.samples: list[tuple[int, str]] = []

    def start(self, title: str, total: int, done: int, tokens: Tokens = int) -> None: ...
    def row(self, row: Mapping[str, Any]) -> None:
        self.rows.append(row)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def sample(self, step: int, text: str) -> None:
        self.samples.append((step, text))

    def close(self) -> None: ...


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(tmp_path / "cache")))
    corpus = write_corpus(tmp_path / "corpus")
    text = small_recipe(corpus, schedule={"steps": 9, "warmup": 2}, run={"save_every": 2, "keep": 10})
    (tmp_path / "recipe.toml").write_text(text)
    return load_recipe(str(tmp_path / "recipe.toml"))


def part_of(recipe: Recipe, out: Path, steps: int) -> Summary:
    """The first `steps` steps of a run, as an interruption leaves it: the listener asks to stop."""
    import os
    import signal

    class Stopper(Listener):
        def row(self, row: Mapping[str, Any]) -> None:
            if row["step"] == steps:
                os.kill(os.getpid(), signal.SIGTERM)

    return train_recipe(recipe, out, view=Stopper())


def test_every_step_has_one_row_with_the_scheduled_rate_and_the_view_sees_them_all(
    recipe: Recipe, tmp_path: Path
) -> None:
    seen = Listener()
    summary = train_recipe(recipe, tmp_path / "run", view=seen)
    written = rows(tmp_path / "run")
    assert [row["step"] for row in written] == [row["step"] for row in seen.rows] == list(range(1, 10))
    assert [row["lr"] for row in written] == [learning_rate(recipe, step) for step in range(1, 10)]
    assert summary.step == 9
    assert not summary.interrupted
    assert summary.loss == written[-1]["loss"]
    assert summary.best_val_loss == min(row["val_loss"] for row in written if "val_loss" in row)
    assert [step for step, _ in seen.samples] == [9]
    assert seen.samples[0][1].startswith("def ")
    assert any("tokens to train on" in note for note in seen.notes)


def told(folder: Path) -> list[dict[str, Any]]:
    """The rows without what depends on the clock."""
    timed = ("tokens_per_s", "step_s", "data_s", "memory_bytes", "mfu", "hfu", "ceiling_fraction")
    return [{key: value for key, value in row.items() if key not in timed} for row in rows(folder)]


def test_steps_that_are_still_under_way_change_neither_rows_nor_weights(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device a step is launched while the one before is at work; a CPU is always done, so it is made to deny it."""
    train_recipe(recipe, tmp_path / "waiting")
    monkeypatch.setattr(LaunchedStep, "ready", False)
    seen = Listener()
    train_recipe(recipe, tmp_path / "going-on", view=seen)
    assert [row["step"] for row in seen.rows] == list(range(1, 10))
    assert told(tmp_path / "going-on") == told(tmp_path / "waiting")
    assert checkpoint_files(tmp_path / "going-on") == checkpoint_files(tmp_path / "waiting")
    cut = part_of(changed(recipe, {"run.save_every": 0}), tmp_path / "cut", 4)
    # The request came with row 4, when step 5 was launched already: it is finished, recorded and saved.
    assert cut.step == 5
    assert told(tmp_path / "cut") == told(tmp_path / "waiting")[:5]
    train_recipe(None, tmp_path / "cut", resume=True)
    assert told(tmp_path / "cut") == told(tmp_path / "waiting")


def test_an_interrupted_run_resumes_to_the_same_bits(recipe: Recipe, tmp_path: Path) -> None:
    train_recipe(recipe, tmp_path / "whole")
    summary = part_of(recipe, tmp_path / "cut", 5)
    assert summary.interrupted
    assert summary.step == 5
    assert (tmp_path / "cut" / "checkpoints" / "step-000005").is_dir()
    train_recipe(None, tmp_path / "cut", resume=True)
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")
    ours, theirs = checkpoint_files(tmp_path / "cut"), checkpoint_files(tmp_path / "whole")
    last = [name for name in theirs if name.startswith("checkpoints/step-000009/")]
    assert len(last) == 5
    assert all(ours[name] == theirs[name] for name in last)


def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(
    recipe: Recipe, tmp_path: Path
) -> None:
    train_recipe(recipe, tmp_path / "whole")
    part_of(recipe, tmp_path / "cut", 5)
    weights = tmp_path / "cut" / "checkpoints" / "step-000005" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-7] ^= 0x10
    weights.write_bytes(content)
    seen = Listener()
    train_recipe(None, tmp_path / "cut", resume=True, view=seen)
    assert any(
        "DAMAGED" in note and "step-000005" in note and "model.safetensors" in note for note in seen.notes
    )
    assert "Resuming from step-000004." in seen.notes
    assert rows(tmp_path / "cut") == rows(tmp_path / "whole")


def test_what_does_not_change_learning_may_change_on_resume_and_the_rest_may_not(
    recipe: Recipe, tmp_path: Path
) -> None:
    part_of(recipe, tmp_path / "run", 3)
    with pytest.raises(RecipeError, match=r"optimizer.lr: 0.01 → 0.02"):
        train_recipe(changed(recipe, {"optimizer.lr": 0.02}), tmp_path / "run", resume=True)
    with pytest.raises(RecipeError, match=r"run.seed"):
        train_recipe(changed(recipe, {"run.seed": 5}), tmp_path / "run", resume=True)
    summary = train_recipe(changed(recipe, {"run.save_every": 1}), tmp_path / "run", resume=True)
    assert summary.step == 9
    assert (tmp_path / "run" / "checkpoints" / "step-000007").is_dir()


def test_resuming_a_finished_run_changes_nothing(recipe: Recipe, tmp_path: Path) -> None:
    train_recipe(recipe, tmp_path / "run")
    before = checkpoint_files(tmp_path / "run"), rows(tmp_path / "run")
    summary = train_recipe(None, tmp_path / "run", resume=True)
    assert summary.step == 9
    assert (checkpoint_files(tmp_path / "run"), rows(tmp_path / "run")) == before


def test_another_corpus_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    part_of(recipe, tmp_path / "run", 3)
    (tmp_path / "corpus" / "more.txt").write_text("A new document.\n" * 40)
    with pytest.raises(DataError, match="not the one this run was trained on"):
        train_recipe(None, tmp_path / "run", resume=True)


def test_a_run_from_given_weights_starts_from_them(recipe: Recipe, tmp_path: Path) -> None:
    train_recipe(recipe, tmp_path / "first")
    second = changed(
        recipe, {"model.init_from": str(tmp_path / "first"), "run.seed": 99, "schedule.steps": 2}
    )
    train_recipe(second, tmp_path / "second")
    fresh = changed(recipe, {"run.seed": 99, "schedule.steps": 2})
    train_recipe(fresh, tmp_path / "fresh")
    assert rows(tmp_path / "second")[0]["loss"] < rows(tmp_path / "fresh")[0]["loss"] - 0.5


def test_rows_that_are_not_numbers_never_reach_the_metrics(recipe: Recipe, tmp_path: Path) -> None:
    train_recipe(recipe, tmp_path / "run")

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_training_draws_nothing_from_the_global_generator_it_was_called_with(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs in one process, with other random numbers drawn between them, are the same run; the first measures the machine."""
    monkeypatch.setenv("RUSH_CACHE", str(tmp_path / "empty"))
    train_recipe(recipe, tmp_path / "one")
    torch.rand(1000)
    train_recipe(recipe, tmp_path / "two")
    assert rows(tmp_path / "one") == rows(tmp_path / "two")
