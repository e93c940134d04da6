"""Saving in the background: training waits for a copy only, one save is under way, and what fails is told and leaves nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from rush.checkpoint import restore
from rush.checkpoint.saver import Saver
from rush.checkpoint.snapshot import StagedCopy
from rush.errors import Diverged, MachineError
from rush.recipe_io import load_recipe
from rush.records.checkpoint_store import CheckpointStore, verify
from rush.records.metrics import SaveRow
from rush.training import loop
from tests.fresh_cache import fresh_cache
from tests.training.small_runs import rows, small_recipe, write_corpus

MB = 2**20


class SlowDisk(CheckpointStore):
    """A store whose disk takes its time, or is full."""

    def begin(self, step: int) -> Path:
        time.sleep(TAKES_S)
        return super().begin(step)


TAKES_S = 1.5


class FullDisk(CheckpointStore):
    def commit(self, step: int, *rest: Any) -> Path:
        if step == 2:
            raise MachineError(f"Cannot write step {step}: the disk is full.")
        return super().commit(step, *rest)


def state(size_bytes: int = MB) -> tuple[nn.Module, Optimizer]:
    model = nn.ParameterList([nn.Parameter(torch.rand(size_bytes // 16)) for _ in range(2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def begin_and_wait(saver: Saver, step: int, run: tuple[nn.Module, Optimizer]) -> None:
    saver.save(step, *run, {})
    saver.wait()


def test_what_is_saved_is_the_state_at_the_call_whatever_training_does_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass may change a buffer and a schedule the learning rate at once; an update waits for a copy that is late."""
    run, store = state(), SlowDisk(tmp_path / "checkpoints")
    run[0].register_buffer("seen", torch.zeros(3))
    run[1].param_groups[0]["lr"] = torch.tensor(0.1)
    expected = restore.save(CheckpointStore(tmp_path / "expected"), 1, *run, {"position": 1})
    plain = StagedCopy.finish
    monkeypatch.setattr(StagedCopy, "finish", lambda copy: (time.sleep(0.5), plain(copy)))
    saver, saved = Saver(store), list[SaveRow]()
    saver.after = saved.append
    saver.save(1, *run, {"position": 1})
    assert not store.path(1).exists()
    before = next(run[0].parameters()).clone()
    run[0].get_buffer("seen").fill_(6.0)
    run[1].param_groups[0]["lr"].fill_(0.2)
    run[1].step()
    assert not torch.equal(before, next(run[0].parameters()))
    saver.wait()
    for file in expected.iterdir():
        assert (store.path(1) / file.name).read_bytes() == file.read_bytes(), file.name
    assert 0.4 < saved[0]["blocked_s"] < TAKES_S, "the wait of the update counts"
    assert not run[1]._optimizer_step_pre_hooks


def test_training_waits_for_the_copy_and_not_for_the_disk(tmp_path: Path) -> None:
    """On a CPU the copy is no small part of a save to a fast disk. So the disk is made slow, and what must not depend on it
    does not: the time that training waits is at most that of a copy of the same bytes, here well below 5 %."""
    run, saved = state(64 * MB), list[SaveRow]()
    saver = Saver(SlowDisk(tmp_path / "checkpoints"), after=saved.append)
    saver.prepare(*run)
    saver._join_preparing()
    for step in (1, 2, 3):
        saver.save(step, *run, {})
        run[1].step()
        saver.wait()
    assert [one["step"] for one in saved] == [1, 2, 3]
    assert all(one["in_background"] and one["num_bytes"] == 64 * MB for one in saved)
    assert all(one["save_s"] > TAKES_S for one in saved)
    shares = sorted(one["blocked_s"] / one["save_s"] for one in saved)
    assert shares[1] < 0.05, shares


def test_one_save_is_under_way_and_the_next_waits_for_it(tmp_path: Path) -> None:
    run, saved = state(), list[SaveRow]()
    saver = Saver(SlowDisk(tmp_path / "checkpoints"), after=saved.append)
    saver.save(1, *run, {})
    saver.save(2, *run, {})
    assert saver.checkpoints.steps() == [1]
    assert sum(thread.name == "rush-save" for thread in threading.enumerate()) == 1
    saver.wait()
    assert saver.checkpoints.steps() == [1, 2]
    assert saved[0]["waited_s"] < 0.1
    assert saved[1]["waited_s"] > 0.9 * TAKES_S
    assert saved[1]["blocked_s"] < 0.5 * TAKES_S, "the wait for the save before is counted apart"


@pytest.mark.parametrize("in_background", [True, False])
def test_a_save_that_fails_is_told_once_and_older_ones_are_intact(
    tmp_path: Path, in_background: bool
) -> None:
    run = state()
    saver = Saver(FullDisk(tmp_path / "checkpoints"), background=in_background)
    saver.save(1, *run, {})
    with pytest.raises(MachineError, match="the disk is full"):
        begin_and_wait(saver, 2, run)
    assert not saver.failed
    assert [path.name for path in saver.checkpoints.folder.iterdir()] == ["step-000001"]
    verify(saver.checkpoints.path(1))
    saver.save(3, *run, {})
    saver.wait()
    assert saver.checkpoints.steps() == [1, 3]


def test_an_abandoned_save_leaves_nothing(tmp_path: Path) -> None:
    saver = Saver(SlowDisk(tmp_path / "checkpoints"))
    saver.save(1, *state(), {})
    saver.abandon()
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert not any(thread.name == "rush-save" for thread in threading.enumerate())


def test_without_room_for_a_copy_it_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        available = 100

    monkeypatch.setattr("psutil.virtual_memory", Full)
    saved = list[SaveRow]()
    saver = Saver(CheckpointStore(tmp_path / "checkpoints"), after=saved.append)
    saver.prepare(*state())
    saver.save(1, *state(), {})
    assert saver.checkpoints.steps() == [1]
    assert not saved[0]["in_background"]
    assert saved[0]["blocked_s"] == saved[0]["save_s"]


# --- in a run ----------------------------------------------------------------------------------------


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(tmp_path / "cache")))
    path = tmp_path / "small.toml"
    path.write_text(small_recipe(write_corpus(tmp_path / "corpus"), schedule={"steps": 6, "warmup": 2}))
    return lambda *changes: load_recipe(str(path), ["run.save_every=2", "run.keep=9", *changes])


def test_a_run_writes_the_same_in_the_background_and_says_what_it_took(
    recipe: Callable[..., Any], tmp_path: Path
) -> None:
    for name in ("true", "false"):
        loop.train_recipe(recipe(f"run.save_async={name}"), tmp_path / name)
    for step in (2, 4, 6):
        for file in (tmp_path / "true" / "checkpoints" / f"step-{step:06d}").glob("*.safetensors"):
            there = tmp_path / "false" / file.relative_to(tmp_path / "true")
            assert file.read_bytes() == there.read_bytes(), file
    took = [json.loads(line) for line in (tmp_path / "true" / "saves.jsonl").read_text().splitlines()]
    assert [row["step"] for row in took] == [2, 4, 6]
    assert [row["in_background"] for row in took] == [True, True, False], "nothing comes after the last one"
    assert all(0 < row["blocked_s"] <= row["save_s"] for row in took)


def failing(step: int) -> type[CheckpointStore]:
    class Failing(CheckpointStore):
        def commit(self, at: int, *rest: Any) -> Path:
            if at == step:
                raise MachineError("Cannot write it: the disk is full.")
            return super().commit(at, *rest)

    return Failing


def test_a_run_ends_with_the_message_of_a_save_that_failed(
    recipe: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rush.records.run_folder.CheckpointStore", failing(4))
    with pytest.raises(MachineError, match="the disk is full"):
        loop.train_recipe(recipe("schedule.steps=400"), tmp_path / "run")
    steps = [row["step"] for row in rows(tmp_path / "run")]
    assert 4 <= steps[-1] <= 7, "it is told at the next step or two, not at the end"
    folder = tmp_path / "run" / "checkpoints"
    assert [path.name for path in folder.iterdir()] == ["step-000002"]
    monkeypatch.undo()
    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(tmp_path / "cache")))
    loop.train_recipe(recipe("schedule.steps=8"), tmp_path / "other")
    assert verify(folder / "step-000002").step == 2


def test_a_run_that_diverges_names_the_checkpoint_that_was_under_way(
    recipe: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(CheckpointStore):
        def begin(self, step: int) -> Path:
            time.sleep(1.0)
            return super().begin(step)

    monkeypatch.setattr("rush.records.run_folder.CheckpointStore", Slow)
    plain = loop.Session._start

    def spoiled(self: Any, step: int, *rest: Any) -> Any:
        if step == 3:
            with torch.no_grad():
                next(self.run.model.parameters()).fill_(torch.nan)
        return plain(self, step, *rest)

    monkeypatch.setattr(loop.Session, "_start", spoiled)
    with pytest.raises(Diverged, match=r"the last good checkpoint is .*step-000002"):
        loop.train_recipe(recipe(), tmp_path / "run")
    verify(tmp_path / "run" / "checkpoints" / "step-000002")
