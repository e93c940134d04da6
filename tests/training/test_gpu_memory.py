"""On a CUDA device held to a part of it: a validation that does not fit runs in pieces, and a save takes nothing of the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rush.checkpoint.saver import Saver
from rush.data import Batch
from rush.hardware import probe
from rush.recipe_io import load_recipe
from rush.records.checkpoint_store import CheckpointStore, verify
from rush.training.build import build
from rush.training.loop import train_recipe
from rush.training.step import train_step, validate
from tests.evaluate.long_held_out import long_recipe, write_answers
from tests.new_process import in_new_process
from tests.training.small_runs import rows, rush_alone

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def test_a_validation_that_does_not_fit_runs_in_pieces_to_the_same_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes some 0.5 GB, validation of 8 long rows 4.7 GB, of one 0.6."""
    monkeypatch.setenv("RUSH_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "long.toml"
    path.write_text(long_recipe(write_answers(tmp_path / "answers.jsonl"), vocab_size=131072))
    held, free = tmp_path / "held", tmp_path / "free"
    words = ["run.deterministic=false", "run.memory_limit_gb=1.6"]
    done = rush_alone("train", path, *words, "--out", held, cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Validation runs in pieces of") == 1
    train_recipe(load_recipe(str(path), ["run.deterministic=false"]), free)
    validated, whole = ([row for row in rows(each) if "val_loss" in row] for each in (held, free))
    assert len(validated) == len(whole) == 2
    for mine, theirs in zip(validated, whole, strict=True):
        assert mine["val_loss"] == pytest.approx(theirs["val_loss"], rel=1e-4)
        assert mine["val_rows"] < 8


def test_a_save_takes_nothing_of_the_device(tmp_path: Path) -> None:
    recipe = load_recipe("tiny", ["batch.micro=2", "batch.sequence=64", "batch.total_tokens=128"])
    run = build(recipe, probe("cuda"))
    tokens = torch.randint(0, run.model.shape.vocab_size, (2, 64))
    batch = Batch(tokens, tokens.clone())
    train_step(run, 1, 1e-3, [batch])
    saver = Saver(CheckpointStore(tmp_path / "checkpoints"))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    saver.prepare(run.model, run.optimizer)
    saver.save(1, run.model, run.optimizer, {})
    saver.wait()
    assert torch.cuda.max_memory_allocated() - before < 2**16
    assert verify(saver.checkpoints.path(1)).step == 1


def test_beside_a_captured_graph_a_validation_takes_memory_of_its_own() -> None:
    """As the plan says: memory of the graph's pool is not given to others."""
    grown, logits = in_new_process(memory_that_validation_reserves)
    assert grown > 0.9 * logits


def memory_that_validation_reserves() -> tuple[int, int]:
    """What validation adds to reserved memory beside a captured graph, and the bytes of its logits and their gradient."""
    words = ["batch.micro=4", "batch.sequence=256", "batch.total_tokens=1024", "model.shape.vocab_size=32768"]
    recipe = load_recipe("tiny", [*words, 'techniques=["cuda_graph"]'])
    run = build(recipe, probe("cuda"))
    tokens = torch.randint(0, run.model.shape.vocab_size, (4, 256))
    batch = Batch(tokens, tokens.clone())
    for step in (1, 2):
        train_step(run, step, 1e-3, [batch])
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    validate(run, [batch])
    return torch.cuda.memory_reserved() - before, 8 * 4 * 256 * 32768
