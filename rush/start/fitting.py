"""Fit a recipe to the memory of a device with the planner, method by method, micro batch by micro batch.

It takes the first method that fits with the planner's expected error to spare, from full fine-tuning to the one with the least
memory, and the fastest of its micro batches. If none fits, rows are halved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rush.errors import RecipeError, RushError
from rush.hardware import probe
from rush.hardware.catalog import CATALOG
from rush.plan.memory import context_of
from rush.plan.micro_batch import best, candidates, rates_of
from rush.plan.planning import ERRORS, Plan, plan, problems_of
from rush.plan.spec import spec_of
from rush.plan.target import TargetMachine, target_of, with_memory_limit
from rush.recipe import Recipe
from rush.recipe_io import parse
from rush.start.methods import Method, Techniques

SHORTEST = 128
"""Rows are not halved below this."""
ASSUMED_CORES = 32
"""Cores of the CPU whose rates are assumed if none were measured (`rush plan --machine cpu`)."""
INSTEAD = {
    "cudnn_attention": "flash_attention", "flash_attention": "flex_attention", "fused_loss": "chunked_loss",
}  # fmt: skip
"""Replacements if a technique does not support a device or a model (a sliding window, soft-capped scores)."""
STAND_INS = ("4090", "l40s", "h100-sxm", "h200-sxm", "b200", "mi300x")
"""Devices to plan for where only an amount of memory is given, by their memory."""


@dataclass(frozen=True)
class Place:
    """The device to plan for."""

    target: TargetMachine
    why: str
    limit_gb: float | None = None
    """For `run.memory_limit_gb`."""
    machine: str | None = None
    """For `rush plan --machine`; None: this machine."""


def find_place(device: str | None, memory_gb: float | None) -> Place:
    """The device by name, by its memory, or this machine's own."""
    if memory_gb is not None and not 0 < memory_gb < 1e6:
        raise RecipeError(f"--memory is {memory_gb:g}; allowed: gigabytes of a device, greater than 0.")
    if device is not None:
        found = Place(target_of(device), f"{device} of the catalog, as asked", machine=device.lower())
        return _limited(found, memory_gb)
    here = probe()
    if here.device == "cuda" or memory_gb is None:
        target = _scaled(rates_of(here), here.cpu.num_cores)
        target = replace(target, memory_bytes=float(here.memory_bytes), devices=1, devices_per_node=1)
        return _limited(Place(target, f"this machine's ({here.name})"), memory_gb)
    name = next((one for one in STAND_INS if CATALOG[one].memory_bytes >= memory_gb * 1e9), None)
    if name is None:
        largest = CATALOG[STAND_INS[-1]].memory_bytes / 1e9
        raise RecipeError(
            f"--memory is {memory_gb:g} GB, more than any device of the catalog has ({largest:.0f}); name one with --device."
        )
    found = Place(
        target_of(name),
        f"{name}: a GPU of the catalog with this memory, as this machine has none",
        machine=name,
    )
    return _limited(found, memory_gb)


def _scaled(target: TargetMachine, cores: int) -> TargetMachine:
    """The assumed rates of a server's CPU, for as many cores as there are here."""
    if target.how != "assumed":
        return target
    share = min(1.0, cores / ASSUMED_CORES)
    return replace(
        target,
        name="this CPU",
        matmul={dtype: rate * share for dtype, rate in target.matmul.items()},
        bytes_per_s=target.bytes_per_s * share,
    )


def _limited(place: Place, memory_gb: float | None) -> Place:
    """With its memory limited, unless the limit says what the device has anyway."""
    if memory_gb is None or (
        place.target.kind == "cuda" and 0.92 < memory_gb * 1e9 / place.target.memory_bytes < 1.08
    ):
        return place
    limited = with_memory_limit(place.target, memory_gb)
    return replace(place, target=limited, limit_gb=memory_gb, why=f"{place.why}, limited to {memory_gb:g} GB")


@dataclass(frozen=True)
class Fit:
    """A recipe that fits, its plan, and the rejected attempts."""

    recipe: Recipe
    plan: Plan
    method: Method
    left_out: tuple[str, ...]
    """Techniques that this device does not support, with the reason."""
    rejected: tuple[str, ...]
    """Methods that do not fit, with the memory they would take."""


Draft = Callable[[Method, int], dict[str, Any]]
"""The tree of a recipe, without micro batch, by method and sequence."""


def fit(draft: Draft, methods: Sequence[Method], sequence: int, place: Place, *, fixed_sequence: bool) -> Fit:
    """The first method that fits; rows are halved where none does."""
    rejected: list[str] = []
    refusal: RushError | None = None
    length = sequence
    while length >= min(SHORTEST, sequence):
        for method in methods:
            try:
                found, left_out = _supported(draft(method, length), place.target)
                planned = _with_micro(found, place.target)
            except RushError as error:
                refusal = error
                rejected.append(f"{_short(method)}: {error}")
                continue
            if planned.fits and not planned.tight:
                return Fit(planned.recipe, planned.plan, method, left_out, tuple(rejected))
            rejected.append(
                f"{_short(method)}: {planned.plan.life.total / 1e9:.1f} GB at {length:,} tokens a row"
            )
        if fixed_sequence:
            break
        length //= 2
    if refusal is not None and not any(" GB at " in one for one in rejected):
        raise refusal
    raise RecipeError(
        f"Nothing fits the {place.target.memory_bytes / 1e9:.1f} GB of {place.target.name}: {'; '.join(rejected[-2:])}. Take a smaller "
        "model, a device with more memory (--device, --memory), or several devices (`rush plan --search`)."
    )


@dataclass(frozen=True)
class _Planned:
    recipe: Recipe
    plan: Plan

    @property
    def fits(self) -> bool:
        return self.plan.fits

    @property
    def tight(self) -> bool:
        return self.plan.tight


def _short(method: Method) -> str:
    return method.name + (" with activations recomputed" if method.recompute else "")


def _supported(tree: dict[str, Any], target: TargetMachine) -> tuple[Recipe, tuple[str, ...]]:
    """The recipe without the techniques that the device does not support; an adapter is never left out."""
    left_out: list[str] = []
    while True:
        recipe = parse(tree, auto=True)
        trial = parse({**tree, "batch": {**tree["batch"], "micro": 1}}) if recipe.auto else recipe
        problems = [problem for problem in problems_of(trial, target) if problem.technique]
        if not problems:
            return recipe, tuple(left_out)
        first = problems[0]
        if first.technique in ("lora", "qlora", "int8_base"):
            raise RecipeError(f"{target.name} cannot run {first.text}.")
        left_out.append(first.text)
        tree = {**tree, "techniques": _without(tree["techniques"], first.technique)}


def _without(techniques: Techniques, name: str) -> Techniques:
    """The techniques without this one, or with the next best in its place."""
    instead = [INSTEAD[name]] if name in INSTEAD else []
    found: Techniques = []
    for one in techniques:
        found += [one] if (one if isinstance(one, str) else one["name"]) != name else instead
    return found


def _with_micro(recipe: Recipe, target: TargetMachine) -> _Planned:
    """The fastest micro batch that fits with the expected error to spare, and its plan."""
    if recipe.auto:
        driver = context_of(target.kind) if target.kind == "cuda" else 0
        error = ERRORS[target.how, False][0]
        # A micro batch of a thousand short rows is no faster, and its plan takes long.
        choices = candidates(recipe, lambda one: spec_of(one, target.kind))
        recipe = best(choices, target, target.memory_bytes / (1 + error) - driver)
    return _Planned(recipe, plan(spec_of(recipe, target.kind), target, limits=False))
