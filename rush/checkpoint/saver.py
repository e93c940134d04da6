"""Asynchronous checkpoints, one at a time.

A thread copies the state (`snapshot`), hashes it and syncs it to the disk (`writer`). Training continues at once and waits,
before its next optimizer step, for the rest of the copy (for all of it, where it comes from a device). The next save waits for
the one under way. The thread uses no collective.

An error in the thread is raised by the next `wait` (before the next save, or at the end), on all ranks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from rush.checkpoint.frozen_base import describe_base
from rush.checkpoint.snapshot import NoHostMemory, StagedCopy, Staging
from rush.checkpoint.state import (
    OptimizerTable,
    StateRecord,
    clean_name,
    pack_model,
    pack_optimizer,
    pack_random,
)
from rush.checkpoint.writer import NTH, CheckpointContent, Writer
from rush.hardware.memory_use import MemoryLimit, free_host_memory, process_memory
from rush.models.adapters import is_adapted
from rush.parallel import Ranks
from rush.parallel.placement import TensorShard, to_write
from rush.parallel.watchdog import Wait
from rush.records.checkpoint_pieces import KINDS
from rush.records.checkpoint_store import CheckpointStore
from rush.records.metrics import SaveRow

JOIN_S = 0.5


@dataclass
class _SaveJob:
    """A save under way."""

    content: CheckpointContent
    began: float
    waited_s: float = 0.0
    packed_s: float = 0.0
    copy: StagedCopy | None = None
    """Set for a save in the background."""
    done: SaveRow | None = None
    error: BaseException | None = None

    @property
    def blocked_s(self) -> float:
        """How long training waited: to start the copy, and before the next optimizer step to have it."""
        return self.packed_s + (self.copy.waited_s if self.copy else 0.0)


class _Abandoned(Exception):
    """The run ends without this save."""


@dataclass
class Saver:
    """Saves the checkpoints of one run."""

    checkpoints: CheckpointStore
    ranks: Ranks = field(default_factory=Ranks)
    background: bool = True
    after: Callable[[SaveRow], None] = lambda saved: None
    """Called on rank 0 once a checkpoint is committed, in the thread that wrote it."""
    note: Callable[[str], None] = lambda text: None
    room: Callable[[], float] = free_host_memory
    """Host memory, in bytes, that copies may take."""

    def __post_init__(self) -> None:
        self._staging = Staging(self.room)
        self._job: _SaveJob | None = None
        self._thread: threading.Thread | None = None
        self._preparing: threading.Thread | None = None
        self._hook: RemovableHandle | None = None
        """Makes the optimizer step wait for the copy under way."""
        self.failed_step: int | None = None
        """The step of the save whose error `wait` has raised."""
        self._abandoned = threading.Event()
        self._writer = Writer(self.checkpoints, self.ranks, self._check_abandoned)

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        extra: Mapping[str, Any],
        metrics: Mapping[str, float | None] | None = None,
        *,
        last: bool = False,
    ) -> None:
        """Start the checkpoint of this state; all ranks call this. Waits for the save before it, and raises its error.

        The `last` one of a run is written in place, without a copy.

        `extra` (loader state, schedule, counters) must be JSON without NaN or infinity; `load` returns it.
        `metrics` go into the manifest; the store ranks checkpoints by their `val_loss`.
        """
        asked = time.perf_counter()
        self.wait()
        began = time.perf_counter()
        shards, tied, table = self._shards(model, optimizer)
        random_tensors, random_state = pack_random()
        state: StateRecord = {"step": step, "extra": dict(extra), "optimizer": table, "random": random_state}
        if is_adapted(model):
            state["base"] = describe_base(model, self.ranks)  # a collective where the base is sharded
        content = CheckpointContent(
            step, self.ranks.next_id(), shards, tied, table, state, random_tensors, dict(metrics or {})
        )
        job = self._job = _SaveJob(content, began, waited_s=began - asked)
        self._join_preparing()
        copy = None if last else self._start_copy(job, model)
        if copy is None:
            self._run(job)
            if not self.background:
                self.wait()
            return
        job.copy = copy
        job.content = replace(job.content, shards=copy.shards)
        self._hook = optimizer.register_step_pre_hook(lambda *_: copy.wait())
        job.packed_s = time.perf_counter() - job.began
        self._thread = threading.Thread(target=self._run, args=(job,), name="rush-save", daemon=True)
        self._thread.start()

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Allocate the buffers of copies in the background, which takes longer than to fill them. All ranks call this; if one has
        no memory for a copy, none makes one."""
        if not self.background:
            return
        shards = self._shards(model, optimizer)[0]
        if self._all_could(lambda: self._staging.check_room(shards)):
            self._preparing = threading.Thread(target=self._staging.allocate, args=(shards,), daemon=True)
            self._preparing.start()

    def _start_copy(self, job: _SaveJob, model: nn.Module) -> StagedCopy | None:
        """Start a copy of the state; None without background saves, or if some rank has no memory for one."""
        trained = {clean_name(name) for name, p in model.named_parameters() if p.requires_grad}
        made: list[StagedCopy] = []

        def copy() -> None:
            self._staging.check_room(job.content.shards)
            made.append(self._staging.copy(job.content.shards, partial(_only_updates_change, trained)))

        return made[0] if self.background and self._all_could(copy) else None

    def _all_could(self, attempt: Callable[[], None]) -> bool:
        """Whether all ranks had memory for this. If one has not, none makes copies from now on."""
        why = ""
        try:
            attempt()
        except NoHostMemory as error:
            why = f"{error}" if self.ranks.main else f"on rank {self.ranks.rank} {error}"
        reasons = [each for each in self.ranks.all_gather_object(why) if each]
        if reasons:
            self.background = False
            self._staging.release()
            self.note(
                "Checkpoints are written while training waits, as with run.save_async=false: the host has no memory for a copy of the "
                f"state ({reasons[0]})."
            )
        return not reasons

    def _join_preparing(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    @property
    def failed(self) -> bool:
        """Whether a save has failed, which `wait` will raise."""
        return self._job is not None and self._job.error is not None

    def wait(self) -> SaveRow | None:
        """Wait for the save under way, and raise its error, on all ranks alike."""
        with self.ranks.waiting(Wait.SAVE):
            while self._thread is not None:
                self._thread.join(JOIN_S)  # in short turns, so that signals are handled
                self._thread = self._thread if self._thread.is_alive() else None
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        job, self._job = self._job, None
        if job is None:
            return None
        if job.error is not None:
            self.failed_step = job.content.step
            raise job.error
        return job.done

    def _check_abandoned(self) -> None:
        if self._abandoned.is_set():
            raise _Abandoned

    def abandon(self) -> None:
        """Give up the save under way once its current file is written; nothing of it stays."""
        self._abandoned.set()
        with contextlib.suppress(BaseException):
            self.wait()

    def _shards(
        self, model: nn.Module, optimizer: Optimizer
    ) -> tuple[dict[str, dict[str, TensorShard]], dict[str, str], OptimizerTable]:
        """The shards that this rank writes, the model's tied names, the optimizer's table."""
        model_tensors, tied = pack_model(model)
        optimizer_tensors, table = pack_optimizer(model, optimizer)
        # Assigned together, so that all ranks write about as much.
        both = {f"model:{name}": tensor for name, tensor in model_tensors.items()}
        both |= {f"optimizer:{name}": tensor for name, tensor in optimizer_tensors.items()}
        shards: dict[str, dict[str, TensorShard]] = {kind: {} for kind in KINDS}
        for name, held in to_write(both, self.ranks).items():
            kind, _, own = name.partition(":")
            # In a file every piece has its own name.
            shards[kind] |= {
                own if len(held) == 1 else f"{own}{NTH}{n}": shard for n, shard in enumerate(held)
            }
        return shards, tied, table

    def _run(self, job: _SaveJob) -> None:
        """Write the checkpoint; in a thread or not."""
        try:
            if job.copy is not None:
                job.copy.finish()
            self._writer.write(job.content, partial(self._finish, job))
        except BaseException as error:
            job.error = error

    def _finish(self, job: _SaveJob, path: Path) -> None:
        save_s = time.perf_counter() - job.began
        in_background = job.copy is not None
        job.done = {
            "step": job.content.step,
            "save_s": save_s,
            "blocked_s": job.blocked_s if in_background else save_s,
            "waited_s": job.waited_s,
            "num_bytes": job.content.num_bytes,
            "in_background": in_background,
        }
        if self.ranks.main:
            self.after(job.done)


def room_for_copies(device: torch.device, limit: MemoryLimit | None) -> float:
    """Host memory, in bytes, that copies of this run's state may keep. On a CPU the next step must still fit beside them."""
    room = free_host_memory()
    if device.type == "cuda":
        return room
    now = process_memory()
    room -= now.peak_resident_bytes - now.resident_bytes
    return room if limit is None else min(room, limit.room_bytes)


def _only_updates_change(trained: set[str], kind: str, name: str) -> bool:
    """Whether only the optimizer step changes this tensor: not a buffer, nor a group's learning rate."""
    own = name.partition(NTH)[0]
    return own in trained if kind == "model" else not own.startswith("group.")
