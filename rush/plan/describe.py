"""One-line descriptions of plans, which of them are distinct, and why the others lose."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from rush.parallel import AXES
from rush.plan.planning import Plan
from rush.plan.spec import Spec
from rush.techniques import registry


@cache
def alternatives(question: str) -> tuple[str, ...]:
    """The techniques that answer a question of the search (see `Technique.alternative`)."""
    return tuple(name for name, technique in registry().items() if technique.alternative == question)


def describe(spec: Spec) -> str:
    """A plan in a few words: `fsdp 8 (parameters), micro 2, amp_bf16, checkpoint_selective`."""
    layout = [f"{axis} {spec.size(axis)}{_summary(spec, axis)}" for axis in AXES if spec.size(axis) > 1]
    questions = ("precision", "fp8", "checkpointing")
    how = [name for question in questions for name in alternatives(question) if spec.uses(name)]
    return ", ".join([*(layout or ["one device"]), f"micro {round(spec.micro / spec.rows)}", *how])


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
    return next((name for name in alternatives("checkpointing") if spec.uses(name)), "")


def _precision(spec: Spec) -> str:
    half = next((name for name in alternatives("precision") if spec.uses(name)), "fp32")
    return f"{half} with fp8" if spec.uses(*alternatives("fp8")) else half


def _ways(spec: Spec) -> dict[str, str]:
    """A plan's choices, by question."""
    stage = str(spec.knob("fsdp", "stage", "parameters")) if spec.size("fsdp") > 1 else "none"
    sharding = {
        "none": "no shards (ddp)",
        "parameters": "fsdp parameters (ZeRO-3)",
        "gradients": "fsdp gradients (ZeRO-2)",
        "optimizer": "fsdp optimizer (ZeRO-1)",
    }
    if spec.size("fsdp") > 1 and spec.size("ddp") > 1:
        stage_words = f"{sharding[stage]} with replicas"
    else:
        stage_words = sharding[stage]
    if spec.knob("fsdp", "offload", False):
        stage_words += " on the host"
    return {
        "sharding": stage_words,
        **{axis: f"{axis} {spec.size(axis)}" for axis in ("tp", "pp", "cp")},
        "checkpointing": _checkpoint(spec) or "no checkpointing",
        "precision": _precision(spec),
    }


def lost_to(plans: list[Plan], best: Plan) -> Iterator[str]:
    """For each choice that is not the best plan's: how its best plan compares."""
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
    """The part with the largest increase in time per token."""
    per = [(name, other.time.parts.get(name, 0) / other.spec.step_tokens - best.time.parts.get(name, 0) / best.spec.step_tokens)
           for name in {*other.time.parts, *best.time.parts}]  # fmt: skip
    name, more = max(per, key=lambda item: item[1])
    share = more * other.spec.step_tokens / other.time.step
    return f": {share:.0%} of its time more for {name}" if share > 0.01 else ""
