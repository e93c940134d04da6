"""`batch.micro = "auto"`: take what the planner finds best, and believe it only after a real step.

The step is tried at the largest shapes the data has, in a run that is thrown away again, so that what follows is to the
bit what it would be with the number written in the recipe. Behind it the largest held-out batch is validated and a sample
begun: what runs out of memory there is too much as well. (A save takes nothing of a device; on a CPU room for the copy of a
state is left beside.) If memory runs out, half is tried. Several ranks try together,
and what is too much for one is too much for all. The run's record holds the number: a resumed run never chooses.

A process that the system kills for its memory cannot tell. So before each trial a note is left in the run's folder, and
the next start there (a launcher's restart, or yours) goes on with half of what it finds noted.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rush.data import Batch
from rush.errors import MachineError
from rush.files import write_json_atomic
from rush.hardware import Machine, free_memory, out_of_memory, peak_memory_bytes, reset_peak_memory
from rush.hardware.memory_use import give_back_freed, memory_in_use
from rush.parallel import Ranks
from rush.plan.memory import memory_of
from rush.plan.micro_batch import best, candidates, needed, rates_of
from rush.plan.spec import spec_of
from rush.recipe import Recipe
from rush.techniques import check
from rush.train.build import Run, build
from rush.train.corpus import Corpus
from rush.train.reference import set_live_reference, wants_cached
from rush.train.sample import gathered_run, sample_ids
from rush.train.schedule import learning_rate
from rush.train.step import train_step, validate

UPDATES = 2
"""Moments are made by the first, so the step of the second is the fullest."""
SPARE = 0.05
"""Of a CPU's room, left for what the run has besides: a loader, a view."""
MOST_STEPS = 8
"""Mixed precision in fp16 leaves out the first few updates."""
PASSES = 2
"""From the second on there are gradients beside the activations; more are not fuller, but in a pipeline."""


@dataclass(frozen=True)
class MicroBatchSearch:
    """What a micro batch is tried with."""

    machine: Machine
    corpus: Corpus
    weights: dict[str, torch.Tensor] | None
    ranks: Ranks
    folder: Path
    note: Callable[[str], None]

    def choose(self, recipe: Recipe) -> Recipe:
        """The recipe with a micro batch that fits, as a number: the same on all ranks."""
        possible = candidates(recipe, lambda one: check(one, self.machine))
        room = min(self.ranks.all_gather_object(self._room(possible[0])))
        give_back_freed()
        before = 0 if self.machine.device == "cuda" else memory_in_use("cpu")
        failed = self.ranks.on_rank0(self._failed_before)
        if failed is not None:
            self.note(
                f"The last start here ended while it tried batch.micro {failed}; trying no more than half."
            )
            possible = _half(possible, failed)
        one = best(possible, rates_of(self.machine), room) if possible else None
        while one is not None:
            self.ranks.on_rank0(lambda micro=one.micro: self._write(micro))  # type: ignore[misc]
            took = self._try(one, before, room)
            if took is not None:
                self.ranks.on_rank0(self._remove)
                self.note(
                    f"batch.micro is {one.micro}: planned {_gib(needed(one, self.machine.device))}, took {_gib(took)} of "
                    f"{_gib(room)} GiB; {one.accumulation} to a step of {one.step_tokens:,} tokens."
                )
                return one
            possible = _half(possible, one.micro)
            if possible:
                self.note(
                    f"Out of memory with batch.micro {one.micro} ({_gib(room)} GiB); trying {possible[-1].micro}."
                )
            one = possible[-1] if possible else None
        self.ranks.on_rank0(self._remove)
        raise MachineError(
            f"out of memory with the smallest micro batch that batch.micro=auto may take, on {self.machine.summary()} with "
            f"{_gib(room)} GiB free for it; shorten batch.sequence, or add checkpoint_full."
        )

    def _room(self, recipe: Recipe) -> float:
        """Bytes that this rank may take."""
        device, limit = self.machine.device, recipe.run.memory_limit_gb
        free = float(free_memory(device))
        if device != "cuda":
            free /= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # those on this machine share its memory
        room = min(free, limit * 1e9) if limit is not None else free
        if device == "cpu" and recipe.run.save_async:
            # A copy of the state is kept while a checkpoint is written.
            state = memory_of(spec_of(recipe, device)).parts
            room -= sum(state.get(name, 0.0) for name in ("parameters", "optimizer", "master"))
        return room

    def _try(self, recipe: Recipe, before: int, room: float) -> float | None:
        """Bytes that two steps at the largest shapes, a validation and a sample took beyond `before`; None if that was too much
        for a rank."""
        device = self.machine.device
        reset_peak_memory(device)
        took: float | None = None
        try:
            took = self._life(recipe) - before
        except BaseException as error:
            if not out_of_memory(error):
                self._remove()
                raise
        _forget()
        if device == "cpu" and took is not None and took > (1 - SPARE) * room:
            took = None
        told = self.ranks.all_gather_object(took)
        return None if None in told else max(each for each in told if each is not None)

    def _life(self, recipe: Recipe) -> int:
        """All that a run does, once; the most it took. (A limit on a CPU begins a new peak with each part.)"""
        run = build(recipe, self.machine, self.weights, self.ranks)
        self._steps(recipe, run)
        peaks = [peak_memory_bytes(self.machine.device)]
        held_out = _answered(run, self.corpus.largest(recipe, run.loader_options, "validation"))
        validate(run, [held_out])
        peaks.append(peak_memory_bytes(self.machine.device))
        whole = gathered_run(run) if recipe.run.sample_tokens else None
        if whole is not None and self.ranks.main:
            with run.held():
                next(iter(sample_ids(whole, self.corpus)[1]), None)  # which takes the memory of all
        return max(*peaks, peak_memory_bytes(self.machine.device))

    def _steps(self, recipe: Recipe, run: Run) -> None:
        set_live_reference(run, self.weights)
        batch = _answered(run, self.corpus.largest(recipe, run.loader_options))
        passes = recipe.accumulation if recipe.layout.pp > 1 else min(PASSES, recipe.accumulation)
        updates = 0
        for step in range(1, MOST_STEPS + 1):
            updates += not train_step(run, step, learning_rate(recipe, 1), [batch] * passes).skipped
            if updates == UPDATES:
                return

    @property
    def _file(self) -> Path:
        return self.folder / "trying-micro.json"

    def _failed_before(self) -> int | None:
        if not self._file.is_file():
            return None
        return int(json.loads(self._file.read_text())["micro"])

    def _write(self, micro: int) -> None:
        write_json_atomic(self._file, {"micro": micro})

    def _remove(self) -> None:
        self._file.unlink(missing_ok=True)


def _half(of: list[Recipe], micro: int) -> list[Recipe]:
    return [one for one in of if one.micro <= micro // 2]


def _answered(run: Run, batch: Batch) -> Batch:
    """With some number where training will have the reference's."""
    if not wants_cached(run):
        return batch
    return replace(batch, reference_b=torch.zeros(batch.tokens_bt.shape[0]))


def _forget() -> None:
    """Give back what a thrown-away run held, compiled code too."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"
