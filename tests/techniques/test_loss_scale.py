"""The loss scale of fp16 lives in the optimizer's checkpoint: a resumed run goes on with it and starts no search anew."""

from __future__ import annotations

from pathlib import Path

import torch

from rush.checkpoint import restore
from rush.records.checkpoint_store import CheckpointStore
from rush.training.build import Run
from rush.training.step import train_step
from tests.techniques.tiny_runs import SHORT, make_loader, make_run

FOUND = 512.0
"""A scale that only a run which overflowed comes to."""


def step(run: Run, number: int) -> None:
    with make_loader(run) as loader:
        train_step(run, number, 1e-3, list(loader.next_step()))


def test_a_resumed_run_goes_on_with_the_loss_scale_that_was_found(tmp_path: Path) -> None:
    run = make_run("amp_fp16", overrides=SHORT)
    step(run, 1)
    first = run.scaler.get_scale()
    run.scaler.update(torch.tensor(FOUND))  # as after overflows
    path = restore.save(CheckpointStore(tmp_path), 1, run.model, run.optimizer, {})
    resumed = make_run("amp_fp16", overrides=SHORT)
    restore.load(path, resumed.model, resumed.optimizer)
    step(resumed, 2)
    assert first > FOUND
    assert resumed.scaler.get_scale() == FOUND
    assert resumed.optimizer.param_groups[0]["loss_scale"] == FOUND, (
        "and it is what the next checkpoint holds"
    )
