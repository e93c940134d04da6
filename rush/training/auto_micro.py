"""`batch.micro = "auto"`: use the planner's best micro batch, verified by a real step.

The step is tried at the largest shapes of the data, in a run that is discarded, so that the training afterwards is bit for bit
that of the same number in the recipe. The largest held-out batch is validated and a sample started as well. (A save takes no
device memory; on a CPU memory for the copy of the state is reserved.) After an OOM, half is tried. All ranks try together, and
an OOM on one rank counts for all. The run's recipe records the number: a resumed run never chooses.

A process killed by the OOM killer cannot report. So the candidate is noted in the run's folder before each try, and the next
start there continues with half of the noted one.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rush.data import Batch
from rush.errors import MachineError
from rush.files import write_json_atomic
from rush.hardware import Machine, free_memory, out_of_memory, peak_memory_bytes, reset_peak_memory
from rush.hardware.memory_use import free_host_memory, memory_in_use, trim_heap
from rush.parallel import Ranks
from rush.plan.memory import memory_of
from rush.plan.micro_batch import best, candidates, needed, rates_of
from rush.plan.spec import spec_of
from rush.recipe import Recipe
from rush.records.run_folder import RunFolder
from rush.techniques import check
from rush.training.build import Run, build
from rush.training.corpus import Corpus
from rush.training.reference import set_live_reference, wants_cached
from rush.training.sample import gathered_run, sample_ids
from rush.training.step import train_step, validate

UPDATES = 2
"""The first update allocates the moments, so the second step has the peak."""
SPARE = 0.05
"""Fraction of a CPU's free memory that is reserved for the rest: a loader, a view."""
MOST_STEPS = 8
"""The fp16 gradient scaler skips the first few updates."""
PASSES = 2
"""From the second micro batch on gradients exist beside the activations; more only matter in a pipeline."""


@dataclass(frozen=True)
class MicroBatchSearch:
    """Finds the micro batch of a run."""

    machine: Machine
    corpus: Corpus
    weights: dict[str, torch.Tensor] | None
    ranks: Ranks
    folder: Path
    note: Callable[[str], None]

    def choose(self, recipe: Recipe) -> Recipe:
        """The recipe with a micro batch that fits, the same on all ranks."""
        possible = candidates(recipe, lambda one: check(one, self.machine))
        room = min(self.ranks.all_gather_object(self._room(possible[0])))
        trim_heap()
        before = 0 if self.machine.device == "cuda" else memory_in_use("cpu")
        failed = self.ranks.on_rank0(self._failed_before)
        if failed is not None:
            self.note(f"The last start here ended while trying batch.micro {failed}; trying at most half.")
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
        """Bytes that this rank may use."""
        device, limit = self.machine.device, recipe.run.memory_limit_gb
        free = float(free_memory(device)) if device == "cuda" else free_host_memory()
        room = min(free, limit * 1e9) if limit is not None else free
        if device == "cpu" and recipe.run.save_async:
            # The copy of the state while a checkpoint is written.
            state = memory_of(spec_of(recipe, device)).parts
            room -= sum(state.get(name, 0.0) for name in ("parameters", "optimizer", "master"))
        return room

    def _try(self, recipe: Recipe, before: int, room: float) -> float | None:
        """Peak bytes beyond `before` of two steps at the largest shapes, a validation and a sample; None if a rank ran out."""
        device = self.machine.device
        reset_peak_memory(device)
        took: float | None = None
        try:
            took = self._peak(recipe) - before
        except BaseException as error:
            if not out_of_memory(error):
                self._remove()
                raise
        _free()
        if device == "cpu" and took is not None and took > (1 - SPARE) * room:
            took = None
        peaks = self.ranks.all_gather_object(took)
        return None if None in peaks else max(each for each in peaks if each is not None)

    def _peak(self, recipe: Recipe) -> int:
        """Everything that a run does, once; its peak memory. (A limit on a CPU resets the peak for each part.)"""
        run = build(recipe, self.machine, self.weights, self.ranks)
        self._steps(recipe, run)
        peaks = [peak_memory_bytes(self.machine.device)]
        held_out = _with_reference(run, self.corpus.largest(recipe, run.loader_options, "validation"))
        validate(run, [held_out])
        peaks.append(peak_memory_bytes(self.machine.device))
        whole = gathered_run(run) if recipe.run.sample_tokens else None
        if whole is not None and self.ranks.main:
            with run.held():
                next(iter(sample_ids(whole, self.corpus)[1]), None)  # the first token allocates all memory
        return max(*peaks, peak_memory_bytes(self.machine.device))

    def _steps(self, recipe: Recipe, run: Run) -> None:
        set_live_reference(run, self.weights)
        batch = _with_reference(run, self.corpus.largest(recipe, run.loader_options))
        passes = recipe.accumulation if recipe.layout.pp > 1 else min(PASSES, recipe.accumulation)
        updates = 0
        for step in range(1, MOST_STEPS + 1):
            updates += not train_step(run, step, recipe.optimizer.lr / 1000, [batch] * passes).skipped
            if updates == UPDATES:
                return

    @property
    def _file(self) -> Path:
        return RunFolder(self.folder).trying

    def _failed_before(self) -> int | None:
        if not self._file.is_file():
            return None
        return int(json.loads(self._file.read_text())["micro"])

    def _write(self, micro: int) -> None:
        write_json_atomic(self._file, {"micro": micro})

    def _remove(self) -> None:
        self._file.unlink(missing_ok=True)


def _half(recipes: list[Recipe], micro: int) -> list[Recipe]:
    return [one for one in recipes if one.micro <= micro // 2]


def _with_reference(run: Run, batch: Batch) -> Batch:
    """The batch with placeholders for the reference's log-probabilities."""
    if not wants_cached(run):
        return batch
    return replace(batch, reference_b=torch.zeros(batch.tokens_bt.shape[0]))


def _free() -> None:
    """Free the memory of a discarded run, compiled code included."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"
