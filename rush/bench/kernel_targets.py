"""The targets of our kernels, and the measured results: one line per target, size and pass.

A target counts as reached only if our kernel's result was equal to the reference. The interval of a ratio is the bootstrap's
over the samples of both, so a reader sees how close the result is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rush.kernels.study import Pass, Size, Study, Target
from rush.lab.statistics import Floor, ratio_of_medians
from rush.records.kernels import KernelRow


def targets_of(study: Study, sizes: Sequence[Size], rows: Sequence[KernelRow]) -> list[dict[str, Any]]:
    """Every target of a study at every size marked for it."""
    found = {(row["size"], row["contender"], row["step"]): row for row in rows}
    ours = next(contender.name for contender in study.contenders if contender.kind == "ours")
    return [
        _judged(target, size, step, found, ours)
        for target in study.targets
        for size in sizes
        if size.target
        for step in target.passes
    ]


def _judged(
    target: Target, size: Size, step: Pass, rows: Mapping[tuple[str, str, str], KernelRow], ours: str
) -> dict[str, Any]:
    row = rows.get((size.label, ours, step))
    other = rows.get((size.label, target.against, step)) if target.against else None
    reached, interval, why = _reached(target, size, row, other)
    line = {
        "what": describe(target),
        "metric": target.metric,
        "size": size.label,
        "step": step,
        "at_least": target.at_least,
        "at_most": target.at_most,
        "reached": reached,
        "ci95": interval,
        "why": why,
    }
    if reached is None:
        return {**line, "verdict": "not measured"}
    enough = target.at_least is None or reached >= target.at_least
    little = target.at_most is None or reached <= target.at_most
    if interval and enough and little and not _clear(target, interval):
        line["why"] = "a close call: the interval reaches beyond the target"
    correctness = (row.get("correctness") if row else None) or {}
    right = correctness.get("verdict") == "equal"
    if not right:
        line["why"] = f"what it computed is not proved equal: {correctness.get('why', 'not judged')}"
    return {**line, "verdict": "reached" if enough and little and right else "missed"}


def _clear(target: Target, interval: Sequence[float]) -> bool:
    """Whether the whole interval is on the right side."""
    above = target.at_least is None or interval[0] >= target.at_least
    return above and (target.at_most is None or interval[1] <= target.at_most)


def _reached(
    target: Target, size: Size, row: KernelRow | None, other: KernelRow | None
) -> tuple[float | None, list[float] | None, str | None]:
    if row is None or row["status"] != "ok":
        return None, None, (row.get("reason") if row else None) or "our kernel was not measured at this size"
    if target.metric == "ceiling":
        fraction = row["ceiling_fraction"]
        return fraction, None, None if fraction is not None else "the ceiling of this device is not known"
    if target.metric == "memory":
        assert target.of is not None
        held = row["beyond_results_bytes"]
        return (held / target.of(size), None, None) if held is not None else (None, None, "not known here")
    if other is None or other["status"] != "ok":
        return (
            None,
            None,
            f"{target.against}: {(other.get('reason') if other else None) or 'not measured at this size'}",
        )
    mine, theirs = row["time_ms"], other["time_ms"]
    assert mine is not None
    assert theirs is not None
    pair = [theirs["samples"]], [mine["samples"]]
    # A speedup is their time over ours.
    first, second = (pair[1], pair[0]) if target.metric == "speed" else pair
    ratio = ratio_of_medians(first, second, Floor(0.0, 0))
    return ratio.ratio, [ratio.low, ratio.high], None


def describe(target: Target) -> str:
    """The target as a person reads it."""
    bound = (
        f"at least {_number(target, target.at_least)}"
        if target.at_least is not None
        else f"at most {_number(target, target.at_most)}"
    )
    if target.metric == "ceiling":
        return f"{bound} of the measured ceiling"
    if target.metric == "memory":
        return f"memory beyond the results {bound} of {target.of_what}"
    if target.metric == "speed":
        return f"{bound} as fast as {target.against}"
    return f"time {bound} of {target.against}"


def _number(target: Target, value: float | None) -> str:
    assert value is not None
    return f"{100 * value:g} %" if target.metric in ("ceiling", "memory") else f"{value:g}×"
