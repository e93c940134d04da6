"""Which layout, micro batch, checkpointing and precision is fastest for a model on N devices, and why others lose.

Every combination that divides the model and the batch is planned by the same arithmetic as a single plan: a few
thousand, in seconds. What does not fit is left out with the reason. The batch of a step stays what the recipe says, so
more devices mean fewer micro batches each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from rush.errors import RecipeError
from rush.parallel import AXES
from rush.plan.efficiency import DEFAULT, Efficiency
from rush.plan.memory import memory_of
from rush.plan.planning import Plan, plan
from rush.plan.spec import Spec, spec_of
from rush.plan.target import Target
from rush.recipe import Knob, Recipe
from rush.recipe_io import changed
from rush.techniques import registry

CHECKPOINTS = ("", "checkpoint_selective", "checkpoint_full")
STAGES = ("parameters", "gradients", "optimizer", "")
"""Of fsdp; the last is no shards."""
SCHEDULES: tuple[dict[str, Knob], ...] = ({}, {"name": "pp", "schedule": "interleaved", "stages": 4})
"""Of a pipeline: one stage a rank, or four."""
MICROS = (1, 2, 4, 8, 16, 32)
TOKENS_PER_DEVICE = 8192
"""Of a step, where the recipe names no total."""


@dataclass(frozen=True)
class Found:
    """What a search came to."""

    best: tuple[Plan, ...]
    lost: tuple[str, ...]
    """For each way that is not the best one's: how its best plan compares, and what holds it back."""
    tried: int
    fitting: int


def search(
    recipe: Recipe, target: Target, efficiency: Efficiency = DEFAULT, *, best: int = 3, beyond: bool = False
) -> Found:
    """The best few plans for all devices of the target; RecipeError where nothing fits at all.

    `beyond`: also layouts and techniques beside them that this trainer refuses today.
    """
    plans: list[Plan] = []
    tried = 0
    least: tuple[float, str] | None = None
    for offload in (False, True):
        for spec in _specs(recipe, target, beyond, offload):
            tried += 1
            needed = memory_of(spec).total
            if needed > target.memory_bytes:
                if least is None or needed < least[0]:
                    least = needed, describe(spec)
                continue
            made = plan(spec, target, efficiency, limits=False)
            if made.host_fits:
                plans.append(made)
            elif least is None:
                least = (
                    needed,
                    f"{describe(spec)}, and {made.on_host / 2**30:.0f} GiB of the host, which has less",
                )
        if plans:
            break  # parts on the host are slow: only where nothing else fits
    if not tried:
        raise RecipeError(
            f"no layout divides {recipe.model.name} and its batch on {target.devices} devices; change --devices or "
            "batch.total_tokens."
        )
    if not plans:
        assert least is not None
        raise RecipeError(
            f"{recipe.model.name} does not fit {target.devices} × {target.name} in any of {tried:,} ways; the smallest needs "
            f"{least[0] / 2**30:.0f} of {target.memory_bytes / 2**30:.0f} GiB ({least[1]}). Take more or larger devices, "
            "shorter sequences, lora or qlora."
        )
    plans.sort(key=lambda one: -one.tokens_per_s)
    chosen = [plan(one.spec, target, efficiency) for one in _distinct(plans, best)]
    return Found(tuple(chosen), tuple(_lost(plans, chosen[0], target)), tried, len(plans))


def describe(spec: Spec) -> str:
    """A plan in a few words: `fsdp 8 (parameters), micro 2, checkpoint_selective`."""
    layout = [f"{axis} {spec.size(axis)}" for axis in AXES if spec.size(axis) > 1]
    if spec.size("fsdp") > 1:
        place = next(i for i, word in enumerate(layout) if word.startswith("fsdp"))
        parts = ", on the host" if spec.knob("fsdp", "offload", False) else ""
        layout[place] += f" ({spec.knob('fsdp', 'stage', 'parameters')}{parts})"
    if spec.size("pp") > 1 and spec.stages > 1:
        layout[0] += f" ({spec.stages} stages a rank)"
    how = [name for name in ("checkpoint_selective", "checkpoint_full", "fp8") if spec.uses(name)]
    return ", ".join([*(layout or ["one device"]), f"micro {round(spec.micro / spec.rows)}", *how])


def _specs(recipe: Recipe, target: Target, beyond: bool, offload: bool) -> Iterator[Spec]:
    """Every combination that its techniques allow."""
    base = [(name, knobs) for name, knobs in recipe.technique_uses() if name not in (*CHECKPOINTS, *AXES)]
    names = {name for name, _ in base}
    total = recipe.batch.total_tokens or target.devices * max(TOKENS_PER_DEVICE, recipe.batch.sequence)
    whole = "float8" in target.matmul and "compile" in names and "fp8" not in names
    for checkpoint, precision, stage in product(CHECKPOINTS, ("", "fp8") if whole else ("",), STAGES):
        extra = [name for name in (checkpoint, precision) if name]
        if not all(_may(names | set(extra), name) for name in extra):
            continue
        entries: list[str | dict[str, Knob]] = [{"name": name, **knobs} for name, knobs in base]
        entries += extra
        if stage:
            entries.append({"name": "fsdp", "stage": stage, **({"offload": True} if offload else {})})
        elif offload:
            continue
        for layout in _layouts(recipe, target, set() if beyond else {*names, *extra}, bool(stage)):
            kept = entries if not stage or layout["fsdp"] > 1 else entries[:-1]
            for schedule in SCHEDULES if layout["pp"] > 1 else ({},):
                values = {
                    "techniques": [*kept, *([schedule] if schedule else [])],
                    "batch.micro": 1,
                    "batch.total_tokens": total,
                }
                values |= {f"layout.{axis}": size for axis, size in layout.items()}
                try:
                    start = spec_of(changed(recipe, values), target.kind, beyond=beyond)
                except RecipeError:
                    continue  # it does not divide, or a technique refuses this layout
                if layout["pp"] * start.stages <= start.shape.num_layers and (
                    beyond or _stand_together(start)
                ):
                    yield from _batches(start, total)


def _stand_together(spec: Spec) -> bool:
    return all(_may(set(spec.techniques), name) for name in spec.techniques)


def _may(names: set[str], name: str) -> bool:
    """Whether a technique conflicts with none of these."""
    known = registry()
    return name not in known or not names.intersection(known[name].conflicts)


def _layouts(recipe: Recipe, target: Target, named: set[str], sharded: bool) -> Iterator[dict[str, int]]:
    """Ways to divide all devices: tensors inside a server, few stages, shards over all, a server or four."""
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
        if over or not passes or passes < spec.size("pp"):
            continue
        yield replace(spec, micro=micro, passes=passes)


def _distinct(plans: list[Plan], count: int) -> list[Plan]:
    """The fastest of each layout and checkpointing: variants that differ in the micro batch alone are one way."""
    found: dict[tuple[object, ...], Plan] = {}
    for one in plans:
        found.setdefault(
            (*one.spec.layout.items(), one.spec.stages, _checkpoint(one.spec), one.spec.uses("fp8")), one
        )
        if len(found) == count:
            break
    return list(found.values())


def _checkpoint(spec: Spec) -> str:
    return next((name for name in CHECKPOINTS[1:] if spec.uses(name)), "")


def _ways(spec: Spec) -> dict[str, str]:
    """What a plan chose, by question."""
    stage = str(spec.knob("fsdp", "stage", "parameters")) if spec.size("fsdp") > 1 else "none"
    sharding = {
        "none": "no shards (ddp)",
        "parameters": "fsdp parameters (ZeRO-3)",
        "gradients": "fsdp gradients (ZeRO-2)",
        "optimizer": "fsdp optimizer (ZeRO-1)",
    }
    if spec.size("fsdp") > 1 and spec.size("ddp") > 1:
        stage_words = f"{sharding[stage]} with copies"
    else:
        stage_words = sharding[stage]
    return {
        "sharding": stage_words,
        **{axis: f"{axis} {spec.size(axis)}" for axis in ("tp", "pp", "cp")},
        "checkpointing": _checkpoint(spec) or "no checkpointing",
        "precision": "fp8" if spec.uses("fp8") else "no fp8",
    }


def _lost(plans: list[Plan], best: Plan, target: Target) -> Iterator[str]:
    chosen = _ways(best.spec)
    seen: dict[tuple[str, str], Plan] = {}
    for one in plans:
        for question, answer in _ways(one.spec).items():
            seen.setdefault((question, answer), one)
    for (question, answer), other in sorted(seen.items(), key=lambda item: -item[1].tokens_per_s):
        if chosen[question] == answer:
            continue
        ratio = other.tokens_per_s / best.tokens_per_s
        yield f"{answer}: {ratio:.2f}× at best ({describe(other.spec)}){_reason(other, best)}"
    if not any(question == "sharding" and "no shards" in answer for question, answer in seen):
        yield "no shards (ddp): does not fit"
    if not any(question == "checkpointing" and answer == "no checkpointing" for question, answer in seen):
        yield "no checkpointing: does not fit"


def _reason(other: Plan, best: Plan) -> str:
    """The part that takes most more of each token's time."""
    per = [(name, other.time.parts.get(name, 0) / other.spec.step_tokens - best.time.parts.get(name, 0) / best.spec.step_tokens)
           for name in {*other.time.parts, *best.time.parts}]  # fmt: skip
    name, more = max(per, key=lambda item: item[1])
    share = more * other.spec.step_tokens / other.time.step
    return f": {share:.0%} of its time more for {name}" if share > 0.01 else ""
