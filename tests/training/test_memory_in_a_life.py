"""A run that just fits goes on where validation, a sample or the copy for a save does not; with real limits, on a CPU."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rush.checkpoint.saver import Saver, room_for_copies
from rush.data import Batch
from rush.errors import MachineError
from rush.hardware import probe, process_memory
from rush.hardware.memory_use import MemoryLimit
from rush.recipe import Recipe
from rush.recipe_io import load_recipe
from rush.records.checkpoint_store import verify
from rush.training.build import Run, build
from rush.training.corpus import open_corpus
from rush.training.loop import train_recipe
from rush.training.sample import Sampler
from rush.training.step import split_rows, train_step, validate
from rush.training.validation import Validation, rows_before
from tests.evaluate.long_held_out import long_recipe, write_answers
from tests.fresh_cache import fresh_cache
from tests.training.small_runs import checkpoint_files, rows, rush_alone, small_recipe, write_corpus

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how much a process had resident")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(tmp_path / "cache")))
    return tmp_path / "cache"


# --- whole runs --------------------------------------------------------------------------------------


@linux
@pytest.mark.slow  # its parts follow below, and the next test has a limit of memory in a whole run
def test_a_validation_that_does_not_fit_runs_in_pieces_to_the_same_loss(tmp_path: Path, cache: Path) -> None:
    """Steps of 8 short answers take some 100 MB, validation of 8 long ones 1.2 GB, of one 150 MB, what torch loads 200."""
    path = tmp_path / "long.toml"
    path.write_text(long_recipe(write_answers(tmp_path / "answers.jsonl"), vocab_size=32768))
    held, free = tmp_path / "held", tmp_path / "free"
    done = rush_alone("train", path, "run.memory_limit_gb=0.6", "--out", held, cache=cache)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Validation runs in pieces of") == 1, "once"
    train_recipe(load_recipe(str(path)), free)
    validated, whole = ([row for row in rows(one) if "val_loss" in row] for one in (held, free))
    assert [row["step"] for row in validated] == [row["step"] for row in whole] == [2, 4]
    assert {row["val_rows"] for row in validated} <= {1, 2}
    assert not any("val_rows" in row for row in whole)
    for mine, theirs in zip(validated, whole, strict=True):
        assert mine["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-6)
    # What is trained is the same to the bit.
    assert [row["loss"] for row in rows(held)] == [row["loss"] for row in rows(free)]

    # Gone on with from the checkpoint between the two, it validates with what its rows say, and never tries more.
    before, files = rows(held), checkpoint_files(held)
    shutil.rmtree(held / "checkpoints" / "step-000004")
    again = rush_alone("train", "--out", held, "--resume", cache=cache)
    assert again.returncode == 0, again.stderr
    assert "Resuming from step-000002" in again.stderr
    assert "in pieces" not in again.stderr
    assert rows(held) == before
    assert checkpoint_files(held) == files


@linux
@pytest.mark.slow
@pytest.mark.parametrize("axis", ["ddp", "fsdp"])
def test_ranks_validate_in_pieces_of_one_size(axis: str, tmp_path: Path, cache: Path) -> None:
    """By a vote after the pass, or, where a pass has collectives, by plan before it."""
    path = tmp_path / "long.toml"
    path.write_text(long_recipe(write_answers(tmp_path / "answers.jsonl"), vocab_size=32768))
    two, one = tmp_path / "two", tmp_path / "one"
    words = ["batch.micro=4", f"layout.{axis}=2", "run.memory_limit_gb=0.6", "run.drift_every=0"]
    done = rush_alone("train", path, *words, "--nproc", "2", "--out", two, cache=cache)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Validation runs in pieces of") == 1, "rank 0 alone speaks"
    train_recipe(load_recipe(str(path), ["batch.micro=4"]), one)
    validated, whole = ([row for row in rows(each) if "val_loss" in row] for each in (two, one))
    assert len(validated) == len(whole) == 2
    for mine, theirs in zip(validated, whole, strict=True):
        assert mine["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-4)
        assert mine["val_rows"] < 4


@pytest.mark.slow  # what is resident before the run, and so what fits, differs from machine to machine
@linux
def test_a_sample_and_a_copy_that_do_not_fit_are_reported_and_the_run_continues(
    tmp_path: Path, cache: Path
) -> None:
    """The logits of a prompt of some 500 tokens take 260 MB, a copy of the state 50 MB; a step and all it holds 110 MB, what
    torch loads 200."""
    answers = write_answers(tmp_path / "answers.jsonl", held_out_words=1)
    shape = {"batch": {"micro": 1, "total_tokens": 768}, "schedule": {"steps": 3, "warmup": 1}}
    prompt = {
        "sample_prompt": "1 2 3 4 5 6 7 8 9 0 " * 30,
        "sample_every": 2,
        "save_every": 1,
        "sample_tokens": 4,
    }
    path = tmp_path / "wide.toml"
    path.write_text(long_recipe(answers, vocab_size=131072, run=prompt, **shape))
    out = tmp_path / "run"
    done = rush_alone("train", path, "run.memory_limit_gb=0.38", "--out", out, cache=cache)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("A sample ran out of memory: 1 tokens in place of 4") == 1
    assert [
        ("1 tokens in place of 4" in row["why"], bool(row["text"])) for row in rows(out, "samples.jsonl")
    ] == [(True, True)] * 2
    assert done.stderr.count("Checkpoints are written while training waits") == 1
    saves = [json.loads(line) for line in (out / "saves.jsonl").read_text().splitlines()]
    assert [save["in_background"] for save in saves] == [False] * 3
    assert verify(out / "checkpoints" / "step-000003").step == 3


# --- the parts ---------------------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Recipe]:
    path = tmp_path / "small.toml"
    path.write_text(
        small_recipe(
            write_corpus(tmp_path / "corpus"), batch={"micro": 8, "sequence": 16, "total_tokens": 128}
        )
    )
    return lambda *changes: load_recipe(str(path), list(changes))


def stepped(recipe: Recipe) -> tuple[Run, list[Batch]]:
    run = build(recipe, probe("cpu"))
    corpus = open_corpus(recipe, None, lambda text: None)
    train_step(run, 1, 1e-3, [corpus.largest(recipe, run.loader_options)])
    return run, list(corpus.validation(recipe, run.loader_options))


class Narrow(MemoryLimit):
    """Room for so many rows at once, and not for one more: counted in the passes themselves."""

    def __init__(self, run: Run, rows: int) -> None:
        super().__init__(float("inf"))
        self.seen: list[int] = []
        plain = run.objective.loss

        def loss(model: Any, batch: Batch) -> torch.Tensor:
            self.seen.append(batch.tokens_bt.shape[0])
            if self.seen[-1] > rows:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return plain(model, batch)

        run.objective.loss = loss  # type: ignore[method-assign]


def test_the_whole_validation_starts_anew_with_half_and_remembers(recipe: Callable[..., Recipe]) -> None:
    run, batches = stepped(recipe())
    expected = validate(run, batches)
    pieces = [piece for batch in batches for piece in split_rows(batch, 2)]
    in_twos = sum(run.objective.loss(run.model, piece).item() for piece in pieces)
    in_twos /= sum(batch.num_labels for batch in batches)
    notes: list[str] = []
    narrow, validation = Narrow(run, rows=3), Validation(run, notes.append)
    found = validation.loss(lambda: iter(batches))
    assert found == pytest.approx(expected, rel=1e-6)
    assert found == in_twos, "no part of it was computed with more rows"
    assert narrow.seen[:3] == [8, 8, 4], "with what was freed once more, then half"
    assert validation.rows == 2
    assert len(notes) == 1
    assert "pieces of 2 rows" in notes[0]
    narrow.seen.clear()
    assert validation.loss(lambda: iter(batches)) == found
    assert set(narrow.seen) == {2}
    assert len(notes) == 1


def test_one_row_that_does_not_fit_ends_the_run_with_what_to_do(recipe: Callable[..., Recipe]) -> None:
    run, batches = stepped(recipe())
    Narrow(run, rows=0)
    with pytest.raises(
        MachineError, match=r"out of memory in validation.*one row.*batch\.sequence.*chunked_loss"
    ):
        Validation(run, print).loss(lambda: iter(batches))


def test_other_errors_of_a_validation_are_what_they_were(recipe: Callable[..., Recipe]) -> None:
    run, _ = stepped(recipe())

    def broken() -> Iterator[Batch]:
        raise RuntimeError("a broken file")
        yield

    with pytest.raises(RuntimeError, match="a broken file"):
        Validation(run, print).loss(broken)


def test_pieces_of_pairs_keep_them_together_and_figures_count_each_once(tmp_path: Path) -> None:
    from tests.training.small_preferences import preference_recipe, write_pairs

    path = tmp_path / "dpo.toml"
    path.write_text(
        preference_recipe(
            write_pairs(tmp_path / "pairs.jsonl"), objective={"loss": "simpo", "margin": 0.5},
            batch={"micro": 4, "sequence": 48, "total_tokens": 192},
        )
    )  # fmt: skip
    run, batches = stepped(load_recipe(str(path)))
    run.objective.figures()
    expected = validate(run, batches), run.objective.figures()
    Narrow(run, rows=2)
    validation = Validation(run, lambda text: None)
    assert validation.loss(lambda: iter(batches)) == pytest.approx(expected[0], rel=1e-6)
    assert validation.rows == 1
    assert run.objective.figures() == pytest.approx(expected[1], rel=1e-5)


def test_what_a_run_validated_with_is_read_from_its_last_rows() -> None:
    assert rows_before([]) is None
    assert rows_before([{"step": 1, "loss": 2.0}]) is None
    assert rows_before([{"val_loss": 2.0}, {"val_loss": 2.0, "val_rows": 4}, {"loss": 1.0}]) == 4


@linux
def test_a_sample_that_never_fits_is_a_row_with_the_reason(recipe: Callable[..., Recipe]) -> None:
    one = recipe()
    run, _ = stepped(one)
    corpus, notes = open_corpus(one, None, lambda text: None), list[str]()
    sampler = Sampler(notes.append)
    assert set(sampler.row(run, corpus, one, 1)) == {"step", "prompt", "text"}
    run.limit = MemoryLimit(1.0)
    for step in (2, 3):
        row = sampler.row(run, corpus, one, step)
        assert row["text"] is None
        assert row["why"].startswith("out of memory on ")
    assert len(notes) == 1
    assert "left out" in notes[0]


@linux
def test_copies_may_take_what_a_step_leaves(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    run, _ = stepped(recipe())
    room = room_for_copies(run.device, run.limit)
    assert room > 0
    run.limit = MemoryLimit(process_memory().resident_bytes + 5e8, transient_bytes=2e8)
    assert room_for_copies(run.device, run.limit) == pytest.approx(3e8, abs=2e7)
    notes: list[str] = []
    saver = Saver(run_store(tmp_path), note=notes.append, room=lambda: 10.0)
    saver.prepare(run.model, run.optimizer)
    saver.save(1, run.model, run.optimizer, {})
    saver.save(2, run.model, run.optimizer, {})
    saver.wait()
    assert len(notes) == 1
    assert [verify(saver.checkpoints.path(step)).step for step in (1, 2)] == [1, 2]


def run_store(tmp_path: Path) -> Any:
    from rush.records.checkpoint_store import CheckpointStore

    return CheckpointStore(tmp_path / "checkpoints")
