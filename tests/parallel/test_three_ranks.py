"""Three ranks: the first number at which the order of additions matters."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.training.small_runs import checkpoint_files, rows, rush, small_recipe, write_corpus

ROOM = [
    "batch.micro=1",
    "batch.total_tokens=48",
    "run.validate_sequences=3",
    "run.keep=1000",
    "run.save_every=2",
]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_resumed_run_adds_up_gradients_in_the_order_of_one_left_alone(tmp_path: Path) -> None:
    """Gradients must lie in their buckets as they did, or the ranks add them up beginning with another one."""
    cache, whole, resumed = tmp_path / "cache", tmp_path / "whole", tmp_path / "resumed"
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(small_recipe(write_corpus(tmp_path / "corpus"), schedule={"steps": 6, "warmup": 2}))
    three = ("layout.ddp=3", *ROOM, "--nproc", "3")
    done = rush("train", recipe, *three, "--out", whole, cache=cache)
    assert done.returncode == 0, done.stderr
    assert "find_unused_parameters" not in done.stderr
    shutil.copytree(whole, resumed)
    for step in (4, 6):  # as if it had been killed after the first save
        shutil.rmtree(resumed / "checkpoints" / f"step-{step:06d}")
    done = rush("train", "--out", resumed, "--resume", "--nproc", "3", cache=cache)
    assert done.returncode == 0, done.stderr
    assert rows(resumed) == rows(whole)
    assert checkpoint_files(resumed) == checkpoint_files(whole)
