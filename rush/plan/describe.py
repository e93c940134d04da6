"""One-line descriptions of plans, the distinct ones among them, and why the others lose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from rush.parallel import AXES
from rush.plan.planning import Plan
from rush.plan.spec import Spec
from rush.recipe import Knob, Recipe
from rush.recipe_io import changed
from rush.techniques import registry
from rush.techniques.api.contract import Alternative


@cache
def alternatives(choice: Alternative) -> tuple[str, ...]:
    """The techniques among which the search chooses."""
    return tuple(name for name, technique in registry().items() if technique.alternative is choice)


def describe(spec: Spec) -> str:
    """A plan in a few words: `fsdp 8 (parameters, ZeRO-3), micro 2, amp_bf16, checkpoint_selective`."""
    layout = [f"{axis} {spec.size(axis)}{_summary(spec, axis)}" for axis in AXES if spec.size(axis) > 1]
    how = [name for choice in Alternative for name in alternatives(choice) if spec.uses(name)]
    return ", ".join([*(layout or ["one device"]), f"micro {round(spec.micro / spec.rows)}", *how])


def recipe_of(recipe: Recipe, spec: Spec) -> Recipe:
    """The recipe with a plan's layout, micro batch, tokens per step and techniques."""
    values: dict[str, Any] = {f"layout.{axis}": spec.size(axis) for axis in AXES}
    values |= {"batch.micro": round(spec.micro / spec.rows), "batch.total_tokens": spec.step_tokens}
    values["techniques"] = [_entry(name, knobs) for name, knobs in spec.techniques.items()]
    return changed(recipe, values)


def _entry(name: str, knobs: Mapping[str, Knob]) -> Any:
    """A technique as a recipe names it: with the knobs that are not at their defaults."""
    known = registry()[name].knobs
    chosen = {knob: value for knob, value in knobs.items() if knob in known and value != known[knob].default}
    return {"name": name, **chosen} if chosen else name


def _summary(spec: Spec, axis: str) -> str:
    technique = registry()[axis]
    defaults = {name: knob.default for name, knob in technique.knobs.items()}
    found = technique.summary({**defaults, **spec.techniques.get(axis, {})})
    return f" ({found})" if found else ""


def distinct(plans: list[Plan], count: int) -> list[Plan]:
    """The fastest plan of each layout, checkpointing and precision."""
    found: dict[tuple[object, ...], Plan] = {}
    for one in plans:
        found.setdefault(
            (*one.spec.layout.items(), one.spec.stages, _checkpoint(one.spec), _precision(one.spec)), one
        )
        if len(found) == count:
            break
    return list(found.values())


def _checkpoint(spec: Spec) -> str:
    return next((name for name in alternatives(Alternative.CHECKPOINTING) if spec.uses(name)), "")


def _precision(spec: Spec) -> str:
    half = next((name for name in alternatives(Alternative.PRECISION) if spec.uses(name)), "fp32")
    eight_bit = next((name for name in alternatives(Alternative.EIGHT_BIT) if spec.uses(name)), None)
    return f"{half} with {eight_bit}" if eight_bit else half


UNSHARDED, NO_CHECKPOINTING = "no sharding (ddp)", "no checkpointing"


def _choices(spec: Spec) -> dict[str, str]:
    """A plan's choices, by kind."""
    sharding = UNSHARDED
    if spec.size("fsdp") > 1:
        sharding = f"fsdp{_summary(spec, 'fsdp')}{' with replicas' if spec.size('ddp') > 1 else ''}"
    return {
        "sharding": sharding,
        **{axis: f"{axis} {spec.size(axis)}" for axis in ("tp", "pp", "cp")},
        Alternative.CHECKPOINTING: _checkpoint(spec) or NO_CHECKPOINTING,
        Alternative.PRECISION: _precision(spec),
    }


def lost_to(plans: list[Plan], best: Plan) -> Iterator[str]:
    """For each choice that is not the best plan's: how its best plan compares."""
    chosen = _choices(best.spec)
    seen: dict[tuple[str, str], Plan] = {}
    for one in plans:
        for item in _choices(one.spec).items():
            seen.setdefault(item, one)
    for (choice, value), other in sorted(seen.items(), key=lambda item: -item[1].tokens_per_s):
        if chosen[choice] == value:
            continue
        ratio = other.tokens_per_s / best.tokens_per_s
        yield f"{value}: {ratio:.2f}× at best ({describe(other.spec)}){_reason(other, best)}"
    for plain in (("sharding", UNSHARDED), (Alternative.CHECKPOINTING, NO_CHECKPOINTING)):
        if plain not in seen:
            yield f"{plain[1]}: does not fit"


def _reason(other: Plan, best: Plan) -> str:
    """The part with the largest increase in time per token."""
    per = [(name, other.time.parts.get(name, 0) / other.spec.step_tokens - best.time.parts.get(name, 0) / best.spec.step_tokens)
           for name in {*other.time.parts, *best.time.parts}]  # fmt: skip
    name, more = max(per, key=lambda item: item[1])
    share = more * other.spec.step_tokens / other.time.step
    return f": {share:.0%} of its time more for {name}" if share > 0.01 else ""
