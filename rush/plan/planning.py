"""A plan: whether a spec fits a machine, how fast it is, and what a token budget costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from rush.errors import RecipeError
from rush.models import count_parameters
from rush.plan.efficiencies import DEFAULT, Efficiencies
from rush.plan.memory import StepMemory
from rush.plan.run_peak import RunPeak, run_peak_of, staged_bytes
from rush.plan.spec import Spec, check_divides, matmul_dtype, matmul_dtypes_of, with_batch
from rush.plan.target import TargetMachine
from rush.plan.time import StepTime, model_flops_per_token, time_of, tokens_per_s
from rush.recipe import Recipe
from rush.recipe_io import changed
from rush.techniques import conflict_reason, registry, resolve_uses

ERRORS = {
    ("measured here", False): (0.03, 0.10),
    ("measured here", True): (0.15, 0.20),
    ("calibrated", False): (0.03, 0.10),
    ("calibrated", True): (0.15, 0.20),
    ("datasheet", False): (0.05, 0.20),
    ("datasheet", True): (0.15, 0.25),
    ("assumed", False): (0.10, 1.0),
    ("assumed", True): (0.15, 1.0),
}
"""Expected errors of memory and time, by the source of the rates and whether there are several devices; from
`rush plan --check`, rounded up, and guesses for datasheets."""
HOST_ERROR = 0.3
"""Expected error of the time where a step is bound by a host that was not measured."""
MOST_MICRO = 4096
POWER = 0.85
"""Average power draw as a fraction of the board's limit; an assumption."""


@dataclass(frozen=True)
class Plan:
    spec: Spec
    target: TargetMachine
    life: RunPeak
    time: StepTime
    largest_micro: int
    """The largest micro batch that fits; 0: none."""
    longest_sequence: int
    problems: tuple[str, ...] = ()
    """Why this recipe cannot run there, other than memory."""
    phase_times: tuple[float, ...] = (1.0,)
    """The time of a step in every phase of a batch-size schedule, relative to that of the last steps."""

    @property
    def memory(self) -> StepMemory:
        """Memory of a step."""
        return self.life.step

    @property
    def fits(self) -> bool:
        """Whether the whole run fits: steps, validation, samples and checkpoints."""
        return self.life.total <= self.target.memory_bytes and self.host_fits

    @property
    def on_host(self) -> float:
        """Bytes of host memory that the ranks of one node use."""
        return self.memory.host_bytes * min(self.spec.world, self.target.devices_per_node)

    @property
    def staged(self) -> float:
        """Bytes of host memory per node for the copy of the state while a checkpoint is written; optional."""
        return staged_bytes(self.spec) * min(self.spec.world, self.target.devices_per_node)

    @property
    def host_fits(self) -> bool:
        return self.target.host_bytes is None or self.on_host <= self.target.host_bytes

    @property
    def tight(self) -> bool:
        """Whether it fits, but not with the expected error added."""
        return self.fits and self.life.total * (1 + self.expected_error["memory"]) > self.target.memory_bytes

    @property
    def tokens_per_s(self) -> float:
        return tokens_per_s(self.spec, self.time)

    @property
    def mean_tokens_per_s(self) -> float:
        """The same over the whole run: lower with a batch-size schedule, whose first steps are small."""
        tokens = float(sum(part * size for part, size in self.spec.phases))
        seconds = sum(part * time for (part, _), time in zip(self.spec.phases, self.phase_times, strict=True))
        return self.tokens_per_s * tokens / seconds

    @property
    def run(self) -> dict[str, float] | None:
        """Steps, tokens and hours of the run that the recipe describes; None where its steps depend on the data."""
        if self.spec.steps is None:
            return None
        mean = float(sum(part * size for part, size in self.spec.phases))
        tokens = round(self.spec.steps * mean * self.spec.step_tokens)
        return {"steps": self.spec.steps, "tokens": tokens, "hours": tokens / self.mean_tokens_per_s / 3600}

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens_per_s / self.spec.world

    @property
    def mfu(self) -> float | None:
        """Relative to the datasheet's dense peak of the dtype of most matmuls."""
        peak = self.target.peaks.get(matmul_dtype(self.spec))
        return self.tokens_per_s_per_device * model_flops_per_token(self.spec) / peak if peak else None

    @property
    def expected_error(self) -> dict[str, float]:
        memory, time = ERRORS[self.target.how, self.spec.world > 1]
        return {"memory": memory, "time": max(time, HOST_ERROR) if self.waits_for_host else time}

    @property
    def waits_for_host(self) -> bool:
        """Whether the step is bound by a host that was not measured."""
        return not self.target.launch_s and self.time.parts.get("launching", 0.0) > 0.05 * self.time.step

    @property
    def sources(self) -> tuple[str, ...]:
        """Sources of the rates, and the launch overhead."""
        if self.target.launch_s:
            launching = f"an operator call takes {1e6 * self.target.launch_s:.1f} µs of host time, measured"
        elif self.target.kind == "cuda":
            launching = f"an operator call is assumed to take {1e6 * DEFAULT.launch_s:.1f} µs of host time, as on H200s"
        else:
            launching = "operator calls are not counted; `rush probe` measures them"
        unknown = [dtype for dtype in matmul_dtypes_of(self.spec) if dtype not in self.target.matmul]
        taken = [f"the rate of {dtype} matmuls is not known; that of fp32 is used" for dtype in unknown]
        return (*self.target.sources, launching, *taken)

    def budget(self, tokens: float, price: float | None) -> dict[str, float]:
        """Hours, device-hours, energy and, given a price per device-hour, cost of a number of tokens."""
        hours = tokens / self.mean_tokens_per_s / 3600
        device_hours = hours * self.spec.world
        found = {
            "tokens": tokens,
            "hours": hours,
            "device_hours": device_hours,
            "kwh": device_hours * self.target.watts * POWER / 1000,
        }
        return found if price is None else found | {"cost": device_hours * price}

    def say_budget(self, tokens: float, price: float | None) -> str:
        """`budget` as a sentence."""
        found = self.budget(tokens, price)
        unless = "" if self.fits else ", if it fitted"
        days = f" ({found['hours'] / 24:,.0f} days)" if found["hours"] >= 48 else ""
        cost = f", cost {found['cost']:,.0f}" if price is not None else ""
        return (
            f"{tokens:,.0f} tokens{unless}: {found['hours']:,.1f} h{days}, {found['device_hours']:,.0f} device-hours, "
            f"{found['kwh']:,.0f} kWh{cost}"
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        spec = self.spec
        return {
            "machine": {
                "name": self.target.key,
                "devices": spec.world,
                "devices_per_node": self.target.devices_per_node,
                "memory_bytes": int(self.target.memory_bytes),
                "how": self.target.how,
                "sources": list(self.sources),
            },
            "parameters": count_parameters(spec.shape),
            "layout": dict(spec.layout),
            "techniques": {name: dict(knobs) for name, knobs in spec.techniques.items()},
            "batch": {
                "micro": round(spec.micro / spec.rows),
                "sequence": spec.sequence,
                "passes": spec.passes,
                "step_tokens": spec.step_tokens,
            },
            "memory_bytes": {
                **{name: int(value) for name, value in self.memory.parts.items()},
                "total": int(self.memory.total),
                "tensors": int(self.memory.tensors),
            },
            "activations_bytes": {name: int(value) for name, value in self.memory.activations.items()},
            "fullest_moment": self.memory.moment,
            "phases_bytes": {name: int(value) for name, value in self.life.phases.items()},
            "fullest_phase": self.life.fullest,
            "save_host_bytes": int(staged_bytes(self.spec)),
            "host_memory_bytes": int(self.memory.host_bytes),
            "fits": self.fits,
            "tight": self.tight,
            "largest_micro": self.largest_micro,
            "longest_sequence": self.longest_sequence,
            "time_s": {**self.time.parts, "step": self.time.step},
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_device": self.tokens_per_s_per_device,
            "run": self.run,
            "mfu": self.mfu,
            "expected_error": self.expected_error,
            "problems": list(self.problems),
        }


def plan(
    spec: Spec,
    target: TargetMachine,
    efficiency: Efficiencies = DEFAULT,
    *,
    limits: bool = True,
    problems: tuple[str, ...] = (),
    life: RunPeak | None = None,
) -> Plan:
    """Memory (where it is not given) and time of a spec on a machine; with `limits` also the largest batch and the longest
    sequence."""
    check_divides(spec)
    spec = replace(spec, device=target.kind)
    micro = sequence = 0
    if limits:
        rows = spec.micro
        micro = int(_largest(lambda n: with_batch(spec, n), target, MOST_MICRO) / spec.rows)
        context = spec.shape.context
        unit = 128 * spec.size("cp")
        sequence = unit * _largest(
            lambda n: with_batch(spec, rows, n * unit), target, max(1, context // unit)
        )
    found = run_peak_of(spec) if life is None else life
    time = time_of(spec, target, efficiency)
    phases = tuple(
        1.0
        if size == 1
        else time_of(replace(spec, passes=round(spec.passes * size)), target, efficiency).step / time.step
        for _, size in spec.phases
    )
    return Plan(spec, target, found, time, micro, sequence, problems, phases)


def _largest(spec_at: Callable[[int], Spec], target: TargetMachine, most: int) -> int:
    """The largest number whose spec fits, by bisection."""

    def fits(number: int) -> bool:
        return run_peak_of(spec_at(number)).total <= target.memory_bytes

    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@dataclass(frozen=True)
class Problem:
    """Why a recipe cannot run on a machine."""

    text: str
    technique: str = ""
    """The technique whose requirement is not met; empty for other problems."""


def unmet(recipe: Recipe, target: TargetMachine) -> tuple[str, ...]:
    """Why the recipe's techniques cannot run on such a machine."""
    return tuple(problem.text for problem in problems_of(recipe, target))


def problems_of(recipe: Recipe, target: TargetMachine) -> list[Problem]:
    """Unmet requirements and conflicts of the recipe's techniques; libraries are taken as installed."""
    machine = target.machine()
    uses = resolve_uses(recipe)
    names = {use.technique.name for use in uses}
    found = []
    for use in uses:
        found += [
            Problem(f"{use.technique.name}: {requirement.message}", use.technique.name)
            for requirement in use.technique.requires
            if not requirement.library and not requirement.met(machine, recipe)
        ]
        found += [
            Problem(f"{use.technique.name} and {other} cannot be combined{reason and f': {reason}'}")
            for other in sorted(names.intersection(use.technique.conflicts))
            if use.technique.name < other
            for reason in [conflict_reason(use.technique, registry()[other])]
        ]
    if "bfloat16" not in target.matmul and any(use.technique.half_dtype == "bfloat16" for use in uses):
        found.append(Problem("this device has no bf16 tensor cores; use amp_fp16"))
    return found


def on_all_devices(recipe: Recipe, target: TargetMachine) -> Recipe:
    """The recipe with more ddp replicas, so that it takes all devices of the machine."""
    if target.devices == recipe.world:
        return recipe
    layout = recipe.layout.model_dump()
    filled = fill_devices(layout, target.devices)
    return changed(recipe, {f"layout.{axis}": n for axis, n in filled.items() if n != layout[axis]})


def fill_devices(spec_layout: dict[str, int], devices: int) -> dict[str, int]:
    """The layout for this many devices: the rest becomes ddp replicas."""
    world = math.prod(spec_layout.values())
    if devices % world:
        raise RecipeError(
            f"the layout takes {world} devices, which does not divide the {devices} asked for; give a multiple of {world}, "
            "or let --search choose the layout."
        )
    return {**spec_layout, "ddp": spec_layout.get("ddp", 1) * (devices // world)}
