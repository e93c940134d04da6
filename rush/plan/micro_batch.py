"""Which micro batch `batch.micro = "auto"` should be: of all that divide the step and fit, the one with the shortest step.

The tokens of a step stay what they are, so another micro batch means another number of passes. Fewer, larger passes
keep a device busier, but leave a pipeline longer empty, so the planned time decides; where it hardly differs, the
larger micro batch wins. `rush train` tries the choice with a real step (`rush/train/auto_micro.py`); `rush plan` believes it.
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
"""Planned times that differ by less are as good as equal."""


def candidates(recipe: Recipe, check: Callable[[Recipe], object]) -> list[Recipe]:
    """The recipe with every micro batch that its step can be made of and `check` does not refuse, smallest first."""
    rows = recipe.step_tokens // (recipe.batch.sequence * recipe.data_ranks)
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
    """Bytes that a run takes of a device, in a step or besides; on a GPU, beyond what the driver has taken already."""
    total = run_peak_of(spec_of(recipe, device)).total
    return total - context_of(device) if device == "cuda" else total


def best(of: Sequence[Recipe], target: TargetMachine, room: float) -> Recipe:
    """The one to try: the fastest by plan of those that fit into `room` bytes; the smallest where none does."""
    fitting = [one for one in of if needed(one, target.kind) <= room]
    if not fitting:
        return of[0]
    seconds = [time_of(spec_of(one, target.kind), target).step for one in fitting]
    return [one for one, each in zip(fitting, seconds, strict=True) if each <= (1 + ALIKE) * min(seconds)][-1]


def settled(recipe: Recipe, target: TargetMachine) -> Recipe:
    """The recipe with its micro batch as a number, by plan alone."""
    if not recipe.auto:
        return recipe
    driver = context_of(target.kind) if target.kind == "cuda" else 0
    return best(
        candidates(recipe, lambda one: spec_of(one, target.kind)), target, target.memory_bytes - driver
    )


def rates_of(machine: Machine) -> TargetMachine:
    """What is known of this machine's rates: measured, of its datasheet, or assumed. For comparing, not for telling."""
    known = known_ceilings(machine)
    if known is not None and known.matmul and known.bandwidth:
        return target_here(machine, known.rates())
    sheet = find(machine.devices[0]) if machine.device == "cuda" else None
    return target_of(
        sheet.key if sheet else "h100-sxm" if machine.device == "cuda" else "cpu", machine.num_devices
    )
