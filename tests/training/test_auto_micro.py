"""`batch.micro = "auto"` in real runs: tried with real steps, halved when memory runs out, written down, never chosen again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rush.errors import MachineError, RecipeError
from rush.plan.micro_batch import needed
from rush.recipe import Recipe
from rush.recipe_io import changed, load_recipe
from rush.training.loop import train_recipe
from tests.fresh_cache import fresh_cache
from tests.training.small_preferences import preference_recipe, write_pairs
from tests.training.small_runs import checkpoint_files, rows, rush_alone, small_recipe, write_corpus
from tests.training.test_loop import Listener, part_of

SHORT = {
    "schedule": {"steps": 4, "warmup": 0},
    "run": {"sample_tokens": 0, "deterministic": False, "save_every": 2},
}


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(tmp_path / "cache")))
    text = small_recipe(write_corpus(tmp_path / "corpus"), batch={"total_tokens": 128}, **SHORT)
    (tmp_path / "small.toml").write_text(text)
    return tmp_path / "small.toml"


def auto(path: Path, *overrides: str) -> Recipe:
    return load_recipe(str(path), ["batch.micro=auto", *overrides], auto=True)


def chosen(folder: Path) -> int:
    return load_recipe(str(folder / "recipe.toml")).micro


def too_hopeful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that believes in the largest micro batch whatever it takes."""
    monkeypatch.setattr("rush.training.auto_micro.best", lambda possible, target, room: possible[-1])


def test_the_run_is_to_the_bit_that_of_the_number_it_chose_and_reports_it(path: Path, tmp_path: Path) -> None:
    seen = Listener()
    train_recipe(auto(path), tmp_path / "auto", view=seen)
    assert chosen(tmp_path / "auto") == 8, "all rows of the step fit"
    assert sum("batch.micro is 8" in note for note in seen.notes) == 1
    train_recipe(load_recipe(str(path), ["batch.micro=8"]), tmp_path / "given")
    assert rows(tmp_path / "auto") == rows(tmp_path / "given")
    assert checkpoint_files(tmp_path / "auto") == checkpoint_files(tmp_path / "given")
    assert not list((tmp_path / "auto").glob("trying*"))


def test_a_resumed_run_keeps_the_number_and_the_same_command_resumes_it(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = changed(auto(path), {"batch.micro": 2})
    part_of(recipe, tmp_path / "run", steps=2)
    too_hopeful(monkeypatch)
    seen = Listener()
    train_recipe(auto(path), tmp_path / "run", resume=True, view=seen)
    assert chosen(tmp_path / "run") == 2
    assert not any("batch.micro" in note for note in seen.notes)
    train_recipe(recipe, tmp_path / "whole")
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    with pytest.raises(RecipeError, match=r"batch\.total_tokens"):
        train_recipe(auto(path, "batch.total_tokens=256"), tmp_path / "run", resume=True)


def test_what_a_killed_start_was_trying_is_not_tried_again(path: Path, tmp_path: Path) -> None:
    out, seen = tmp_path / "run", Listener()
    out.mkdir()
    (out / "trying-micro.json").write_text(json.dumps({"micro": 8}))
    train_recipe(auto(path), out, view=seen)
    assert chosen(out) == 4
    assert any("batch.micro 8" in note and "half" in note for note in seen.notes)


LONG = ["batch.sequence=256", "batch.total_tokens=8192", "schedule.steps=1", "run.save_async=false"]
"""All scores of a row of 256 take four megabytes: more than the noise of what a process has resident."""


@pytest.mark.slow  # what is resident before a step, and so what fits, differs from run to run
def test_out_of_memory_halves_until_it_fits_and_reports_each_time(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.environ.get("RUSH_TEST_ALONE") != "1":
        # A limit on a CPU counts what the process has resident: in one that ran a thousand tests before, no two runs are alike.
        name = "test_out_of_memory_halves_until_it_fits_and_reports_each_time"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-q",
            "-n",
            "0",
            "-m",
            "slow",
            f"{__file__}::{name}",
        ]
        environment = {**os.environ, "RUSH_TEST_ALONE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:]  # 5, if there was no such test
        return
    train_recipe(load_recipe(str(path), LONG), tmp_path / "first")  # so that what torch loads once is loaded
    too_hopeful(monkeypatch)
    recipe = auto(path, *LONG)
    more = needed(changed(recipe, {"batch.micro": 8}), "cpu") - needed(
        changed(recipe, {"batch.micro": 1}), "cpu"
    )
    limit = 2.5 * more
    seen = Listener()
    train_recipe(auto(path, *LONG, f"run.memory_limit_gb={limit / 1e9}"), tmp_path / "run", view=seen)
    told = [note for note in seen.notes if note.startswith("Out of memory with batch.micro")]
    # How much of what a step takes was resident before depends on the C library and the processor.
    halvings = {16: 1, 8: 2, 4: 3}
    assert chosen(tmp_path / "run") in halvings
    assert [f"trying {32 >> n}" in note for n, note in enumerate(told, 1)] == [True] * halvings[
        chosen(tmp_path / "run")
    ]
    with pytest.raises(MachineError, match=r"smallest micro batch .* batch\.sequence"):
        train_recipe(auto(path, *LONG, "run.memory_limit_gb=1e-6"), tmp_path / "none")
    assert not list((tmp_path / "none").glob("*.json"))


@pytest.mark.slow
def test_a_process_with_a_limit_trains_within_it(path: Path, tmp_path: Path) -> None:
    """The planner's choice is right the first time, in a process that really has no more."""
    words = ["train", path, "batch.micro=auto", *LONG, "batch.total_tokens=32768", "run.memory_limit_gb=0.32"]
    done = rush_alone(*words, "--out", tmp_path / "run", cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert "batch.micro is" in done.stderr
    assert 1 < chosen(tmp_path / "run") < 256
    again = rush_alone("train", "--out", tmp_path / "run", "--resume", cache=tmp_path / "cache")
    assert again.returncode == 0, again.stderr
    over = rush_alone("train", path, f"batch.micro={4 * chosen(tmp_path / 'run')}", *words[3:], "--out", tmp_path / "over", cache=tmp_path / "cache")  # fmt: skip
    assert over.returncode == 4, "more would not have fitted"
    assert "out of memory at step" in over.stderr
    assert "Traceback" not in over.stderr


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["ddp", "fsdp", "pp"])
def test_ranks_agree_on_one_number(axis: str, path: Path, tmp_path: Path) -> None:
    out = tmp_path / "two"
    done = rush_alone("train", path, "batch.micro=auto", f"layout.{axis}=2", "--nproc", "2", "--out", out, cache=tmp_path / "cache")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("batch.micro is") == 1, "rank 0 alone speaks"
    recipe = load_recipe(str(out / "recipe.toml"))
    assert recipe.step_tokens == 128
    train_recipe(changed(recipe, {f"layout.{axis}": 1, "batch.micro": 2}), tmp_path / "one")
    for mine, theirs in zip(rows(out), rows(tmp_path / "one"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("reference", ["cached", "live"])
def test_preferences_are_tried_with_their_longest_pairs(
    reference: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(tmp_path / "cache")))
    text = preference_recipe(
        write_pairs(tmp_path / "pairs.jsonl"), objective={"reference": reference}, **SHORT
    )
    (tmp_path / "dpo.toml").write_text(text)
    seen = Listener()
    train_recipe(auto(tmp_path / "dpo.toml"), tmp_path / "run", view=seen)
    assert chosen(tmp_path / "run") == 4
    assert rows(tmp_path / "run")[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
