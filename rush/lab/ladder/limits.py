"""How large a batch pays off, and how long a sequence fits.

A larger batch uses the device better until it is always busy; beyond that it only takes memory. So the curve is measured at
powers of two up to the memory limit, and the report names the point where doubling no longer pays off. Memory is linear in the
batch, and two trials determine the line: sizes that it predicts far beyond the device are not tried. The longest sequence is
found by bisection between the largest size that fitted and the smallest that did not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rush.errors import RecipeError
from rush.lab.ladder.findings import measured
from rush.lab.ladder.ladder_file import Addition, LadderPlan, compose
from rush.lab.statistics import median_interval
from rush.lab.trial.runner import Bench
from rush.lab.trial.timing import rates
from rush.lab.trial.trial import Outcome
from rush.recipe import Recipe

PAYS = 1.03
"""A batch pays off if it is this much faster than the best smaller one."""
HOPELESS = 1.15
"""A size whose extrapolated memory is this many times the device's is not tried."""
Try = Callable[[int], Outcome]


def tries(bench: Bench, base: Recipe, top: Sequence[Addition], key: str) -> Try:
    """A trial of the top of the ladder with one whole-number key of the recipe changed."""

    def attempt(size: int) -> Outcome:
        change = Addition(
            f"{key}={size}", "", None, {key: size, "batch.total_tokens": "none", "batch.schedule": "none"}
        )
        try:
            recipe = compose(base, [*top, change])
        except RecipeError as error:
            return Outcome("unsupported", str(error))
        # A rung of the ladder may be this very recipe.
        return bench.known(recipe, "time-0") or bench.run(recipe, "search-0")

    return attempt


def batch_curve(
    attempt: Try, up_to: int, memory_bytes: int, *, first: int = 1, neighbours: bool = False
) -> list[dict[str, Any]]:
    """Points of tokens per second and memory at growing batches, as the record holds them."""
    points: dict[int, dict[str, Any]] = {}

    def visit(size: int) -> bool:
        points[size] = _point(size, attempt(size))
        return bool(points[size]["status"] == "ok")

    size, failed = first, None
    while size <= up_to:
        if _extrapolated(points, size) > HOPELESS * memory_bytes:
            failed = size
            break
        if not visit(size):
            failed = size
            break
        size *= 2
    if neighbours:
        low = max((s for s, point in points.items() if point["status"] == "ok"), default=0)
        high = failed or 0
        while high - low > max(1, low // 4):
            middle = (low + high) // 2
            low, high = (middle, high) if visit(middle) else (low, middle)
    return [points[size] for size in sorted(points)]


def stops_paying(curve: Sequence[dict[str, Any]]) -> int | None:
    """The batch after which no larger one paid off; None if the largest one still did."""
    best, best_speed = None, 0.0
    measured_points = [point for point in curve if point["status"] == "ok"]
    for point in measured_points:
        speed = point["tokens_per_s"]["median"]
        if speed > PAYS * best_speed:
            best, best_speed = point["micro"], speed
    return best if measured_points and best != measured_points[-1]["micro"] else None


def longest(
    attempt: Try, start: int, up_to: int, memory_bytes: int
) -> tuple[int | None, list[dict[str, Any]]]:
    """The longest sequence that fits, to an eighth, and every point that was tried."""
    points: dict[int, dict[str, Any]] = {}

    def visit(size: int) -> bool:
        points[size] = _point(size, attempt(size))
        return bool(points[size]["status"] == "ok")

    low, size = 0, start
    while size <= up_to and _extrapolated(points, size) <= 2 * HOPELESS * memory_bytes and visit(size):
        low, size = size, 2 * size
    high = min(size, up_to + 1)
    grain = max(64, low // 8)
    while low and high - low > grain:
        middle = (low + high) // 2 // 64 * 64
        if middle in (low, high):
            break
        low, high = (middle, high) if visit(middle) else (low, middle)
    return (low or None), [points[size] for size in sorted(points)]


def sequence_limits(
    bench: Bench, plan: LadderPlan, top: Sequence[Addition], memory_bytes: int
) -> list[dict[str, Any]]:
    """The longest sequence at the top of the ladder, and with each asked-for technique left out (or added)."""
    assert plan.search.sequence_up_to is not None
    context = plan.base.shape().context
    up_to = min(plan.search.sequence_up_to, context)
    ended_by = "the model's context" if up_to == context else "search.sequence_up_to"
    variants = [list(top)]
    for name in plan.search.sequence_with:
        without = [part for part in top if part.technique_name != name]
        variants.append(without if len(without) < len(top) else [*top, Addition(name, name, name, {})])
    rows = []
    for parts in variants:
        attempt = tries(bench, plan.base, parts, "batch.sequence")
        found, points = longest(attempt, min(plan.base.batch.sequence, up_to), up_to, memory_bytes)
        names = [part.technique_name for part in parts if part.technique_name]
        at = next((point for point in points if point["micro"] == found), None)
        rows.append(
            {
                "techniques": names,
                "longest": found,
                "ended_by": "memory" if found != up_to else ended_by,
                "peak_memory_bytes": at and at["peak_memory_bytes"],
                "tried": [{"sequence": point.pop("micro"), **point} for point in points],
            }
        )
    return rows


def _point(size: int, outcome: Outcome) -> dict[str, Any]:
    timing = outcome.found.get("timing")
    speed = None
    if timing is not None:
        samples = [rates(timing)]
        speed = measured(median_interval(samples), samples)
    return {
        "micro": size,
        "tokens_per_s": speed,
        "peak_memory_bytes": timing["peak_memory_bytes"] if timing else None,
        "status": outcome.status,
        "reason": outcome.reason,
    }


def _extrapolated(points: dict[int, dict[str, Any]], size: int) -> float:
    """Memory at `size` by the straight line through the two largest sizes known; 0 where it is not known."""
    known = [(s, point["peak_memory_bytes"]) for s, point in points.items() if point["status"] == "ok"]
    if len(known) < 2:
        return 0.0
    (first, low), (second, high) = sorted(known)[-2:]
    return float(high + (high - low) / (second - first) * (size - second))
