"""Validation that falls back to fewer rows per forward pass when memory runs out.

A held-out batch needs no gradients, so nearly always it fits where a step did. It may not: held-out documents can be longer
than those trained on, and a captured graph keeps its memory to itself. Then the whole validation restarts with half the rows
per pass, down to one. The mean is over all labels, so this only changes the order of sums; the value follows from the weights
and the number of rows (`val_rows` in its row), which a run keeps to its end, resumed or not.

All ranks take the same number. Where forward passes have collectives, a rank that runs out of memory leaves the others waiting
in one: there the planner chooses the number before the first pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch

from rush.data import Batch
from rush.errors import MachineError
from rush.hardware import fragmentation_hint, out_of_memory
from rush.hardware.memory_use import free_cached
from rush.parallel.sharded import is_sharded
from rush.plan.run_peak import run_peak_of
from rush.plan.spec import spec_of, with_batch
from rush.records.metrics import MetricsRow
from rush.training.build import Run
from rush.training.step import reduce_validation, validate_local

HeldOut = Callable[[], Iterable[Batch]]
"""Returns the held-out batches, from the first one at each call."""


@dataclass
class Validation:
    """The validations of one run."""

    run: Run
    note: Callable[[str], None]
    rows: int | None = None
    """Rows per forward pass, where fewer than in training."""

    @cached_property
    def _planned(self) -> int:
        return planned_rows(self.run)

    def loss(self, held_out: HeldOut) -> float:
        """Mean loss per unit over the held-out batches of all ranks."""
        rows, tried_again, gaps = self.rows or self._planned, False, ""
        while True:
            total, units, failed, why = self._try(held_out, rows)
            if not failed:
                self._keep(rows)
                return total / units
            gaps = gaps or why
            self.run.objective.figures()  # reset: they cover only some of the batches
            free_cached(self.run.device.type)
            if not tried_again:
                tried_again = True  # the freed memory may suffice
            elif rows > 1:
                rows //= 2
            else:
                raise MachineError(
                    f"{self._place}{gaps}: not even one row at a time fits; shorten batch.sequence, or take chunked_loss or "
                    "fused_loss, which never hold all logits."
                )

    def _try(self, held_out: HeldOut, rows: int) -> tuple[float, float, bool, str]:
        """The sums over all ranks, whether memory ran out on one of them, and this rank's hint on fragmentation."""
        total, units, failed, why = 0.0, 0.0, False, ""
        passed = False

        def batches() -> Iterable[Batch]:
            nonlocal passed
            yield from held_out()
            passed = True

        try:
            total, units = validate_local(self.run, batches(), rows)
        except (MemoryError, RuntimeError, OSError) as error:
            if not out_of_memory(error):
                raise
            failed, why = True, fragmentation_hint(error)
            total, units = 0.0, 0.0
        if failed and not passed and has_forward_collectives(self.run):
            raise MachineError(
                f"{self._place}{why}, in a forward pass with collectives, so that the ranks cannot agree on smaller "
                "pieces; lower batch.micro, or take chunked_loss or fused_loss, which never hold all logits."
            )
        return *reduce_validation(self.run, total, units, failed), why

    def _keep(self, rows: int) -> None:
        if rows < (self.rows or self.run.pass_rows):
            whole = self.run.pass_rows
            unit = "pairs" if self.run.recipe.objective.kind == "dpo" else "rows"
            self.note(
                f"Validation runs in pieces of {rows} {unit}: all {whole} at once, as in training, do not fit. Its loss is the "
                "mean over the same labels."
            )
            self.rows = rows

    @property
    def _place(self) -> str:
        return f"out of memory in validation on {self.run.machine.summary()}"


def rows_before(rows: Iterable[MetricsRow]) -> int | None:
    """The `val_rows` of a resumed run's last validation."""
    found = [row.get("val_rows") for row in rows if "val_loss" in row]
    return found[-1] if found else None


def planned_rows(run: Run) -> int:
    """Rows per pass to start with: as in training. With collectives in the forward pass, at most what the plan fits into each
    device, independent of what is free there: a resumed run must find the same number."""
    rows = run.pass_rows
    if not has_forward_collectives(run):
        return rows
    limit, kind = run.recipe.run.memory_limit_gb, run.device.type
    whole = torch.cuda.get_device_properties(run.device).total_memory if kind == "cuda" else math.inf
    room = min(run.ranks.all_gather_object(whole if limit is None else limit * 1e9))
    spec = spec_of(run.recipe, kind)

    def needed(rows: int) -> float:
        return run_peak_of(with_batch(spec, -(-rows * spec.micro // run.pass_rows))).besides["validation"]

    while rows > 1 and needed(rows) > room:
        rows //= 2
    return rows


def has_forward_collectives(run: Run) -> bool:
    """Whether a forward pass of this run has collectives."""
    ranks = run.ranks
    return not ranks.alone and (
        ranks.size("pp") * ranks.size("cp") * ranks.size("tp") > 1
        or any(is_sharded(parameter) for parameter in run.model.parameters())
    )
