"""Saving a training state in the background, one save at a time.

A thread copies the state to memory of its own (`staging`), hashes it and forces it to the disk (`save_writing`). Training goes
on at once and waits, before its next update, for the rest of the copy (for all of it, where that comes from a device). One
save is under way at a time: the next one waits for it. Collectives stay with the training: the thread uses none.

What goes wrong in a thread is kept and raised by the next `wait` (before the next save, at the end), on all ranks alike.
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
from rush.checkpoint.snapshot import Copy, NoHostMemory, Staging
from rush.checkpoint.state import clean_name, pack_model, pack_optimizer, pack_random
from rush.checkpoint.writer import NTH, CheckpointContent, Writer
from rush.hardware.memory_use import Limit, host_room, process_memory
from rush.models.adapters import is_adapted
from rush.parallel import Ranks
from rush.parallel.placement import TensorShard, to_write
from rush.records.checkpoint_pieces import KINDS
from rush.records.checkpoint_store import CheckpointStore

LOOK_S = 0.5


@dataclass(frozen=True)
class SaveResult:
    """A save that is done."""

    step: int
    path: Path
    save_s: float
    """From its beginning to the sealed checkpoint."""
    blocked_s: float
    """What training waited for, of that."""
    waited_s: float
    """What it waited, before that, for the save before to end."""
    num_bytes: int
    """Written by this rank."""
    in_background: bool


@dataclass
class _SaveJob:
    """A save, independent of what training does meanwhile."""

    content: CheckpointContent
    began: float
    waited_s: float = 0.0
    packed_s: float = 0.0
    copy: Copy | None = None
    """Of a save in the background."""
    done: SaveResult | None = None
    error: BaseException | None = None

    @property
    def blocked_s(self) -> float:
        """What training waited for: to begin the copy, and before the next update to have it."""
        return self.packed_s + (self.copy.waited_s if self.copy else 0.0)


class _Abandoned(Exception):
    """The run ends without this save."""


@dataclass
class Saver:
    """Saves the states of one run, one after another."""

    checkpoints: CheckpointStore
    ranks: Ranks = field(default_factory=Ranks)
    background: bool = True
    after: Callable[[SaveResult], None] = lambda saved: None
    """Called by rank 0 once a checkpoint is sealed, in the thread that wrote it."""
    note: Callable[[str], None] = lambda text: None
    room: Callable[[], float] = host_room
    """Bytes of the host that copies may take."""

    def __post_init__(self) -> None:
        self._staging = Staging(self.room)
        self._job: _SaveJob | None = None
        self._thread: threading.Thread | None = None
        self._preparing: threading.Thread | None = None
        self._hook: RemovableHandle | None = None
        """Of the copy under way, on the optimizer."""
        self.failed_step: int | None = None
        """Of the save whose error `wait` has raised."""
        self._abandoned = threading.Event()
        self._writer = Writer(self.checkpoints, self.ranks, self._go_on)

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        extra: Mapping[str, Any],
        metrics: Mapping[str, float | None] | None = None,
        meta: Mapping[str, Any] | None = None,
        *,
        last: bool = False,
    ) -> None:
        """Begin the checkpoint of this state; all ranks call this. Waits for the save before, and raises what became of it.

        The `last` one of a run, for which there is nothing to go on with, is written from where the state is.

        `extra` (loader state, schedule, counters) must be JSON without NaN or infinity; `load` returns it.
        `metrics` and `meta` go into the manifest; the store ranks checkpoints by `val_loss` in `metrics`.
        """
        asked = time.perf_counter()
        self.wait()
        job = self._job = self._pack(step, model, optimizer, extra, metrics, meta)
        job.waited_s = job.began - asked
        self._ready()
        copy = None if last else self._copied(job, model)
        if copy is None:
            self._run(job)
            if not self.background:
                self.wait()
            return
        job.copy = copy
        job.content = replace(job.content, parts=copy.parts)
        self._hook = optimizer.register_step_pre_hook(lambda *_: copy.wait())
        job.packed_s = time.perf_counter() - job.began
        self._thread = threading.Thread(target=self._run, args=(job,), name="rush-save", daemon=True)
        self._thread.start()

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Get the memory for copies in the background: to get it takes longer than to fill it. All ranks call this, and where one
        has no room for a copy none makes one."""
        if not self.background:
            return
        parts = self._parts(model, optimizer)[0]
        if self._agreed(lambda: self._staging.check_room(parts)):
            self._preparing = threading.Thread(target=self._staging.get, args=(parts,), daemon=True)
            self._preparing.start()

    def _copied(self, job: _SaveJob, model: nn.Module) -> Copy | None:
        """A copy of the state, begun; None where there is to be none, or some rank has no room for one."""
        trained = {clean_name(name) for name, p in model.named_parameters() if p.requires_grad}
        made: list[Copy] = []

        def copy() -> None:
            self._staging.check_room(job.content.parts)
            made.append(self._staging.copy(job.content.parts, partial(_changed_by_updates_only, trained)))

        return made[0] if self.background and self._agreed(copy) else None

    def _agreed(self, attempt: Callable[[], None]) -> bool:
        """Whether all ranks could do this. If one has no room for copies, none makes them from now on."""
        why = ""
        try:
            attempt()
        except NoHostMemory as error:
            why = f"{error}" if self.ranks.main else f"on rank {self.ranks.rank} {error}"
        told = [each for each in self.ranks.all_gather_object(why) if each]
        if told:
            self.background = False
            self._staging.let_go()
            self.note(
                "Checkpoints are written while training waits, as with run.save_async=false: the host has no memory for a copy of the "
                f"state ({told[0]})."
            )
        return not told

    def _ready(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    @property
    def failed(self) -> bool:
        """Whether a save has gone wrong, which `wait` will raise."""
        return self._job is not None and self._job.error is not None

    def wait(self) -> SaveResult | None:
        """Let the save that is under way come to its end. Raises what went wrong with it, on all ranks alike."""
        while self._thread is not None:
            self._thread.join(LOOK_S)  # in short turns, so that a signal is heard
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

    def _go_on(self) -> None:
        if self._abandoned.is_set():
            raise _Abandoned

    def abandon(self) -> None:
        """End without the save that is under way, as soon as its file in hand is written; nothing of it stays."""
        self._abandoned.set()
        with contextlib.suppress(BaseException):
            self.wait()

    def _pack(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        extra: Mapping[str, Any],
        metrics: Mapping[str, float | None] | None,
        meta: Mapping[str, Any] | None,
    ) -> _SaveJob:
        began = time.perf_counter()
        parts, tied, table = self._parts(model, optimizer)
        random_tensors, random_state = pack_random()
        state = {"step": step, "extra": dict(extra), "optimizer": table, "random": random_state}
        if is_adapted(model):
            state["base"] = describe_base(model, self.ranks)  # of a base in parts all ranks must ask
        sealed = {"metrics": dict(metrics or {}), **(meta or {})}
        number = self.ranks.next_call()
        return _SaveJob(
            CheckpointContent(step, number, parts, tied, table, state, random_tensors, sealed), began
        )

    def _parts(
        self, model: nn.Module, optimizer: Optimizer
    ) -> tuple[dict[str, dict[str, TensorShard]], dict[str, str], dict[str, Any]]:
        """What this rank writes of model and optimizer, the model's ties, the optimizer's table."""
        model_tensors, tied = pack_model(model)
        optimizer_tensors, table = pack_optimizer(model, optimizer)
        # Dealt out together, so that all ranks have as much to write of both.
        both = {f"model:{name}": tensor for name, tensor in model_tensors.items()}
        both |= {f"optimizer:{name}": tensor for name, tensor in optimizer_tensors.items()}
        parts: dict[str, dict[str, TensorShard]] = {kind: {} for kind in KINDS}
        for name, held in to_write(both, self.ranks).items():
            kind, _, own = name.partition(":")
            # In a file every piece has a name of its own.
            parts[kind] |= {own if len(held) == 1 else f"{own}{NTH}{n}": part for n, part in enumerate(held)}
        return parts, tied, table

    def _run(self, job: _SaveJob) -> None:
        """Write this rank's part, and rank 0 the rest; in a thread or not."""
        try:
            if job.copy is not None:
                job.copy.finish()
            self._writer.write(job.content, partial(self._finish, job))
        except BaseException as error:
            job.error = error

    def _finish(self, job: _SaveJob, path: Path) -> None:
        save_s = time.perf_counter() - job.began
        in_background = job.copy is not None
        blocked_s = job.blocked_s if in_background else save_s
        job.done = SaveResult(
            job.content.step, path, save_s, blocked_s, job.waited_s, job.content.num_bytes, in_background
        )
        if self.ranks.main:
            self.after(job.done)


def room_for_copies(device: torch.device, limit: Limit | None) -> float:
    """Bytes of the host that copies of this run's state may take and keep. Where the run itself is on the host, the next step
    must still fit beside them."""
    room = host_room()
    if device.type == "cuda":
        return room
    now = process_memory()
    room -= now.peak_resident_bytes - now.resident_bytes
    return room if limit is None else min(room, limit.room_bytes)


def _changed_by_updates_only(trained: set[str], kind: str, name: str) -> bool:
    """Whether nothing but an update of the weights changes this; buffers change in passes, a group's learning rate before."""
    own = name.partition(NTH)[0]
    return own in trained if kind == "model" else not own.startswith("group.")
