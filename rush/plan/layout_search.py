"""Finds the fastest layout, micro batch, checkpointing and precision for a model on N devices.

Every combination that divides the model and the batch is planned like a single plan: a few thousand, in seconds.
What does not fit is left out with the reason. The tokens per step are the recipe's, so more devices mean fewer
micro batches each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from rush.errors import RecipeError
from rush.parallel import AXES
from rush.plan.describe import alternatives, describe, distinct, lost_to
from rush.plan.efficiencies import DEFAULT, Efficiencies
from rush.plan.planning import Plan, Problem, plan, problems_of
from rush.plan.run_peak import run_peak_of
from rush.plan.spec import Spec, phases_of, spec_of
from rush.plan.target import TargetMachine
from rush.recipe import Knob, Recipe
from rush.recipe_io import CONSTANT_BATCH, changed
from rush.techniques import conflict_reason, registry
from rush.techniques.api.contract import Alternative, Parity

STAGES = ("parameters", "gradients", "optimizer", "")
"""Stages of fsdp; the last: no sharding."""
SCHEDULES: tuple[dict[str, Knob], ...] = ({}, {"name": "pp", "schedule": "interleaved", "stages": 4})
"""Pipeline schedules: one stage per rank, or four."""
MICROS = (1, 2, 4, 8, 16, 32)
HOST_DOUBT = 0.85
"""Derating of plans with CPU offload, which no finding confirms."""
NEAR, MOST_NEAR = 0.7, 24
"""Other precisions are tried with layouts that reach this fraction of the best speed, at most this many."""
TOKENS_PER_DEVICE = 8192
"""Tokens per step and device where the recipe has no total."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search."""

    best: tuple[Plan, ...]
    lost: tuple[str, ...]
    """For each choice that is not the best plan's: how its best plan compares, and why."""
    tried: int
    fitting: int


def search(
    recipe: Recipe,
    target: TargetMachine,
    efficiency: Efficiencies = DEFAULT,
    *,
    best: int = 3,
    beyond: bool = False,
) -> SearchResult:
    """The best plans for all devices of the target; RecipeError where nothing fits.

    All layouts are tried with the recipe's own precision; other precisions with layouts near the best, or with all if
    nothing fits. `beyond`: also combinations that this trainer refuses.
    """
    looked = _Search(recipe, target, efficiency, beyond)
    own = [
        (name, knobs)
        for name, knobs in recipe.technique_uses()
        if name not in (*alternatives(Alternative.CHECKPOINTING), *AXES)
    ]
    looked.at(own)
    looked.at(own, offload=True)
    near, problems = looked.near(), looked.problems.copy()
    halves = [
        own,
        *(
            other
            for name in alternatives(Alternative.PRECISION)
            if (other := _in_precision(own, name)) is not None
        ),
    ]
    for techniques, extra in product(halves, ("", *alternatives(Alternative.EIGHT_BIT))):
        if techniques is not own or extra:
            looked.at(techniques, extra, only=near)
            looked.at(techniques, extra, offload=True)
    if not looked.plans:
        looked.refuse(problems)
    plans = sorted(looked.plans, key=_rank)
    chosen = [plan(one.spec, target, efficiency) for one in distinct(plans, best)]
    lost = [*lost_to(plans, chosen[0]), *looked.left_out()]
    return SearchResult(tuple(chosen), tuple(lost), looked.tried, len(plans))


Techniques = Sequence[tuple[str, Mapping[str, Knob]]]
Layout = frozenset[tuple[str, int]]


class _Search:
    """All combinations planned so far."""

    def __init__(self, recipe: Recipe, target: TargetMachine, efficiency: Efficiencies, beyond: bool) -> None:
        self.recipe, self.target = changed(recipe, CONSTANT_BATCH), target
        self.efficiency, self.beyond = efficiency, beyond
        self.phases = phases_of(recipe)
        self.total = recipe.batch.total_tokens or target.devices * max(
            TOKENS_PER_DEVICE, recipe.batch.sequence
        )
        self.plans: list[Plan] = []
        self.tried = 0
        self.least: tuple[float, str] | None = None
        """The smallest plan: bytes and description."""
        self.smallest_batch: int | None = None
        """Tokens of the smallest step that uses every device."""
        self.problems: Counter[str] = Counter()
        """Why combinations cannot run there."""
        self.dropped: dict[str, None] = {}
        """Why techniques were removed from plans."""
        self._settled: dict[tuple[str, frozenset[str]], list[Any] | None] = {}

    def at(
        self,
        base: Techniques,
        precision: str = "",
        *,
        offload: bool = False,
        only: Collection[Layout] | None = None,
    ) -> None:
        """Plan these techniques (and `precision`) with every layout, or `only` some, every checkpointing and micro batch."""
        target = self.target
        for spec in self._specs(base, precision, offload, only):
            self.tried += 1
            life = run_peak_of(spec)
            if life.total > target.memory_bytes:
                if self.least is None or life.total < self.least[0]:
                    self.least = life.total, describe(spec)
                continue
            made = plan(spec, target, self.efficiency, limits=False, life=life)
            if made.host_fits:
                self.plans.append(made)
            elif self.least is None:
                words = f"{describe(spec)}, and {made.on_host / 2**30:.0f} GiB of host memory, which is not available"
                self.least = life.total, words

    def near(self) -> set[Layout] | None:
        """The layouts whose best plan is near the best; None without plans."""
        if not self.plans:
            return None
        top = -min(_rank(one) for one in self.plans)
        found: set[Layout] = set()
        for one in sorted(self.plans, key=_rank):
            if -_rank(one) < NEAR * top or len(found) == MOST_NEAR:
                break
            found.add(frozenset(one.spec.layout.items()))
        return found

    def refuse(self, problems: Counter[str]) -> None:
        """Raise with why there is no plan; `problems` are those of the recipe's own techniques."""
        name, where = self.recipe.model.name, f"{self.target.devices} × {self.target.name}"
        if self.least is not None:
            raise RecipeError(
                f"{name} does not fit {where} in any of {self.tried:,} combinations; the smallest needs {self.least[0] / 2**30:.0f} of "
                f"{self.target.memory_bytes / 2**30:.0f} GiB ({self.least[1]}). Use more or larger devices, shorter sequences, "
                "lora or qlora."
            )
        if self.smallest_batch is not None:
            batch = self.recipe.batch
            own = batch.micro if isinstance(batch.micro, int) else 1
            raise RecipeError(
                f"no layout of {where} divides a step of {self.total:,} tokens, {self.total // batch.sequence:,} sequences of "
                f"{batch.sequence:,}. Set batch.total_tokens to {math.lcm(self.smallest_batch, own * batch.sequence):,} or a multiple of "
                "that, or change --devices."
            )
        if problems:
            raise RecipeError(f"{name} cannot run on {where}: {problems.most_common(1)[0][0]}.")
        raise RecipeError(f"no layout divides {name} on {where}; change --devices.")

    def left_out(self) -> Iterator[str]:
        """Techniques that cannot run there, and axes that were not tried because of a conflict."""
        yield from (f"left out: {problem}" for problem in self.dropped)
        if self.beyond or self.target.devices == 1:
            return
        for axis in ("tp", "pp", "cp"):
            for name, _ in self.recipe.technique_uses():
                if name in registry() and axis in registry() and not _may({name}, axis):
                    reason = conflict_reason(registry()[name], registry()[axis])
                    yield f"{axis}: not tried, {name} and {axis} cannot be combined{reason and f': {reason}'}"

    def _specs(
        self, base: Techniques, precision: str, offload: bool, only: Collection[Layout] | None
    ) -> Iterator[Spec]:
        """All combinations that the techniques allow."""
        recipe, target, beyond = self.recipe, self.target, self.beyond
        names = {name for name, _ in base}
        if precision and not can_add(precision, names, target):
            return
        stages = ("parameters",) if offload else STAGES
        for checkpoint, stage in product(("", *alternatives(Alternative.CHECKPOINTING)), stages):
            extra = [name for name in (checkpoint, precision) if name]
            if not all(_may(names | set(extra), name) for name in extra):
                continue
            entries: list[str | dict[str, Knob]] = [{"name": name, **knobs} for name, knobs in base]
            entries += extra
            if stage:
                entries.append({"name": "fsdp", "stage": stage, **({"offload": True} if offload else {})})
            for layout in _layouts(recipe, target, set() if beyond else {*names, *extra}, bool(stage)):
                if only is not None and frozenset(layout.items()) not in only:
                    continue
                if offload and (layout["fsdp"] == 1 or max(layout[axis] for axis in ("tp", "pp", "cp")) > 1):
                    continue
                kept = entries if not stage or layout["fsdp"] > 1 else entries[:-1]
                turn = layout["ddp"] * layout["fsdp"] * recipe.batch.sequence
                least = turn * layout["pp"]
                if self.total % turn and least >= (self.smallest_batch or math.inf):
                    continue  # neither divides nor suggests a smaller step
                for schedule in SCHEDULES if layout["pp"] > 1 else ({},):
                    start = self._start([*kept, *([schedule] if schedule else [])], layout, least)
                    if start is None or layout["pp"] * start.stages > start.shape.num_layers:
                        continue
                    self.smallest_batch = min(least, self.smallest_batch or least)
                    yield from _batches(replace(start, phases=self.phases), self.total)

    def _start(self, entries: list[Any], layout: Mapping[str, int], total: int) -> Spec | None:
        """The spec with micro batch 1; None where it does not divide, or cannot run there."""
        values: dict[str, Any] = {"batch.micro": 1, "batch.total_tokens": total}
        values |= {f"layout.{axis}": size for axis, size in layout.items()}
        try:
            if not self.beyond:
                settled = self._settle(entries, layout, values)
                if settled is None:
                    return None
                entries = settled
            found = spec_of(
                changed(self.recipe, {**values, "techniques": entries}), self.target.kind, beyond=self.beyond
            )
        except RecipeError:
            return None  # it does not divide, or a technique refuses this layout
        return found if self.beyond or _compatible(found) else None

    def _settle(
        self, entries: list[Any], layout: Mapping[str, int], values: Mapping[str, Any]
    ) -> list[Any] | None:
        """The techniques that can run with these axes: unchanged, with another setting of one whose requirement is not met, or
        without it if it only affects speed. None where nothing helps."""
        key = repr(entries), frozenset(axis for axis, size in layout.items() if size > 1)
        if key not in self._settled:

            def with_problems(some: list[Any]) -> list[Problem]:
                return problems_of(changed(self.recipe, {**values, "techniques": some}), self.target)

            found: list[Any] | None = entries
            problems = with_problems(entries)
            while problems and found is not None:
                tried = ((other, with_problems(other)) for other in _fixes(found, problems))
                better, fewer = next(
                    (both for both in tried if len(both[1]) < len(problems)), (None, problems)
                )
                if better is None:
                    self.problems.update(problem.text for problem in problems)
                elif len(better) < len(found):
                    self.dropped.update(dict.fromkeys(one.text for one in problems if one not in fewer))
                found, problems = better, fewer
            self._settled[key] = found
        return self._settled[key]


def _fixes(entries: list[Any], problems: Sequence[Problem]) -> Iterator[list[Any]]:
    """What may help: another setting of a technique; then without a technique whose requirement is not met."""
    names = [entry if isinstance(entry, str) else str(entry["name"]) for entry in entries]
    known = [(place, registry()[name]) for place, name in enumerate(names) if name in registry()]
    for place, technique in known:
        for setting in technique.settings:
            yield [*entries[:place], {"name": technique.name, **setting.knobs}, *entries[place + 1 :]]
    for place, technique in known:
        speeds = (
            technique.parity in (Parity.EXACT, Parity.CLOSE)
            and technique.alternative is not Alternative.PRECISION
            and technique.name not in AXES
        )
        if speeds and any(problem.technique == technique.name for problem in problems):
            yield [*entries[:place], *entries[place + 1 :]]


def _rank(one: Plan) -> float:
    """The fastest first; plans with CPU offload are derated."""
    return -one.tokens_per_s * (HOST_DOUBT if one.spec.knob("fsdp", "offload", False) else 1.0)


def _in_precision(base: Techniques, name: str) -> Techniques | None:
    """The recipe's techniques in another 16-bit precision; None if it is the recipe's own."""
    own = {each for each, _ in base}
    precisions = alternatives(Alternative.PRECISION)
    if name in own or not own.intersection(precisions):
        return None
    setting = registry()[name].settings[0]
    added = {
        name: dict(setting.knobs),
        **{each: dict(knobs) for each, knobs in setting.together_with.items()},
    }
    kept = [
        (each, knobs)
        for each, knobs in base
        if each not in precisions and each not in added and not any(not _may({each}, new) for new in added)
    ]
    return [*kept, *added.items()]


def can_add(eight_bit: str, names: set[str], target: TargetMachine) -> bool:
    """Whether 8-bit matmuls are worth trying: the device has them, none that are as fast have cheaper casts, and a compiler fuses
    the casts."""
    known = [registry()[name] for name in names if name in registry()]
    fused = any(effect.term == "stream.fused" for technique in known for effect in technique.work)
    choices = alternatives(Alternative.EIGHT_BIT)
    rate, casts = _speed(eight_bit, target)
    beaten = any(
        other[0] >= rate and other[1] < casts for other in (_speed(name, target) for name in choices)
    )
    return rate > 0 and not beaten and fused and names.isdisjoint(choices)


def _speed(eight_bit: str, target: TargetMachine) -> tuple[float, float]:
    """The rate of a technique's matmuls on this device, 0 where it has none, and the bytes of their casts."""
    effects = {effect.term: effect.value for effect in registry()[eight_bit].work}
    return target.matmul.get(str(effects["blocks.dtype"]), 0.0), float(effects["blocks.casts"])


def _compatible(spec: Spec) -> bool:
    return all(_may(set(spec.techniques), name) for name in spec.techniques)


def _may(names: set[str], name: str) -> bool:
    """Whether a technique conflicts with none of these."""
    known = registry()
    return name not in known or not names.intersection(known[name].conflicts)


def _layouts(
    recipe: Recipe, target: TargetMachine, named: set[str], sharded: bool
) -> Iterator[dict[str, int]]:
    """Layouts of all devices: tp within a node, few stages, shards over all devices, one node or four."""
    shape, devices, per_node = recipe.shape(), target.devices, target.devices_per_node
    sequence = recipe.batch.sequence
    sizes = {
        "tp": [
            n
            for n in (1, 2, 4, 8)
            if n <= per_node and shape.num_kv_heads % n == 0 and shape.intermediate % n == 0
        ],
        "pp": [n for n in (1, 2, 4, 8, 16) if n <= shape.num_layers],
        "cp": [n for n in (1, 2, 4, 8, 16) if sequence % (2 * n) == 0 and sequence // n >= 2048] or [1],
    }
    for axis in sizes:
        if not _may(named, axis):
            sizes[axis] = [1]
    for tp, pp, cp in product(*sizes.values()):
        rest, over = divmod(devices, tp * pp * cp)
        if over:
            continue
        if not sharded:
            if _may(named, "ddp") or rest == 1:
                yield {"pp": pp, "ddp": rest, "fsdp": 1, "cp": cp, "tp": tp}
            continue
        inside = max(1, per_node // (tp * cp))
        for shards in sorted({n for n in (rest, inside, 4 * inside) if n > 1 and rest % n == 0}):
            yield {"pp": pp, "ddp": rest // shards, "fsdp": shards, "cp": cp, "tp": tp}


def _batches(spec: Spec, total: int) -> Iterator[Spec]:
    ranks = spec.size("ddp") * spec.size("fsdp")
    for micro in MICROS:
        passes, over = divmod(total, micro * spec.sequence * ranks)
        small = [passes * size for _, size in spec.phases]
        if over or not passes or min(small) < spec.size("pp") or any(one.denominator > 1 for one in small):
            continue
        yield replace(spec, micro=micro, passes=passes)
