"""Chooses the micro batch of `batch.micro = "auto"`: of all that divide the step and fit, the fastest.

The tokens per step do not change, so another micro batch means another number of passes. Fewer, larger passes use a
device better but lengthen a pipeline's bubble, so the predicted time decides; in a near tie the larger micro batch
wins. `rush train` checks the choice with a real step (`rush/training/auto_micro.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rush.errors import RushError
from rush.hardware import Machine
from rush.hardware.catalog import find
from rush.hardware.ceilings import known_ceilings
from rush.plan.memory import context_of
from rush.plan.run_peak import run_peak_of
from rush.plan.spec import spec_of
from rush.plan.target import TargetMachine, target_here, target_of
from rush.plan.time import time_of
from rush.recipe import Recipe
from rush.recipe_io import changed

ALIKE = 0.01
"""Relative difference of times below which they count as equal."""


def candidates(recipe: Recipe, check: Callable[[Recipe], object]) -> list[Recipe]:
    """The recipe with every micro batch that divides its steps and `check` accepts, smallest first."""
    rows = recipe.common_tokens // (recipe.batch.sequence * recipe.data_ranks)
    found: list[Recipe] = []
    refusal: RushError | None = None
    for micro in (number for number in range(1, rows + 1) if rows % number == 0):
        one = changed(recipe, {"batch.micro": micro})
        try:
            check(one)
        except RushError as error:
            refusal = refusal or error
        else:
            found.append(one)
    if not found:
        assert refusal is not None
        raise refusal
    return found


def needed(recipe: Recipe, device: str) -> float:
    """Peak bytes of a run; on a GPU without the CUDA context."""
    total = run_peak_of(spec_of(recipe, device)).total
    return total - context_of(device) if device == "cuda" else total


def best(of: Sequence[Recipe], target: TargetMachine, room: float) -> Recipe:
    """The fastest of those that fit into `room` bytes; the smallest where none does."""
    fitting = [one for one in of if needed(one, target.kind) <= room]
    if not fitting:
        return of[0]
    seconds = [time_of(spec_of(one, target.kind), target).step for one in fitting]
    return [one for one, each in zip(fitting, seconds, strict=True) if each <= (1 + ALIKE) * min(seconds)][-1]


def with_chosen_micro(recipe: Recipe, target: TargetMachine) -> Recipe:
    """The recipe with its micro batch as a number, by plan alone."""
    if not recipe.auto:
        return recipe
    driver = context_of(target.kind) if target.kind == "cuda" else 0
    return best(
        candidates(recipe, lambda one: spec_of(one, target.kind)), target, target.memory_bytes - driver
    )


def rates_of(machine: Machine) -> TargetMachine:
    """This machine's rates: measured, from its datasheet, or assumed; for comparisons only."""
    known = known_ceilings(machine)
    if known is not None and known.matmul and known.bandwidth:
        return target_here(machine, known.rates())
    sheet = find(machine.devices[0]) if machine.device == "cuda" else None
    return target_of(
        sheet.key if sheet else "h100-sxm" if machine.device == "cuda" else "cpu", machine.num_devices
    )
