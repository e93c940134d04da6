"""The gap between two loss curves in per cent of steps: the cost of a tolerance.

"Within tolerance" means that a curve is close enough, not what the difference costs. A curve above the reference reaches the
same loss later: by the gap divided by the reference's slope. Both are computed over the second half of the steps, the slope by
least squares, and divided by the number of steps, so that 0.02 means: 2 % more steps for the same loss. If the reference does
not fall by more than its own noise there is no slope, and the gap is unknown. A race (`rush race`) measures over a full run
what this estimates from one slope.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

FEWEST = 6
"""Steps of a curve; fewer have no second half to lay a line through."""
CLEAR = 2.0
"""The slope is used where it is this many times its standard error."""
JOIN = "\N{NO-BREAK SPACE}"


def more_steps(losses: Sequence[float], reference: Sequence[float]) -> float | None:
    """The fraction of additional steps that the curve needs for the reference's loss; negative: fewer. None if unknown."""
    count = len(reference)
    if count < FEWEST or len(losses) != count or not all(map(math.isfinite, [*losses, *reference])):
        return None
    half = count // 2
    slope, error = _slope(reference[half:])
    if -slope <= CLEAR * error or slope >= 0:
        return None
    gap = fmean(losses[half:]) - fmean(reference[half:])
    middle = half + (count - half + 1) / 2
    return gap / -slope / middle


def _slope(values: Sequence[float]) -> tuple[float, float]:
    """The slope per step by least squares, and its standard error."""
    count, mean = len(values), fmean(values)
    center = (count - 1) / 2
    spread = sum((step - center) ** 2 for step in range(count))
    slope = sum((step - center) * (value - mean) for step, value in enumerate(values)) / spread
    rest = sum((value - mean - slope * (step - center)) ** 2 for step, value in enumerate(values))
    return slope, math.sqrt(rest / max(1, count - 2) / spread)


def more_steps_words(more: float | None) -> str:
    """`2.3 % more steps`; a sentence's part for every case."""
    if more is None:
        return "the gap in per cent of steps cannot be said, because plain fp32's loss does not fall clearly over them"
    if abs(more) < 0.0005:
        return f"the gap is 0.0{JOIN}% of the steps"
    return (
        f"the gap is {100 * abs(more):.1f}{JOIN}% {'more' if more > 0 else 'fewer'} steps for the same loss"
    )


def gap_in_steps(parity: Mapping[str, Any] | None) -> str:
    """The gap of a recorded parity in short: `2.3 % more steps`; empty where bits or rounding agree, or nothing can be said."""
    more = recorded_more_steps(parity)
    if more is None:
        return ""
    return f"{100 * abs(more):.1f}{JOIN}% {'more' if more >= 0 else 'fewer'} steps"


def recorded_more_steps(parity: Mapping[str, Any] | None) -> float | None:
    """From the curves of a record; None where its verdict does not rest on a loss curve."""
    if not parity or not on_curve(parity):
        return None
    try:
        return more_steps(list(parity.get("losses") or ()), list(parity.get("reference_losses") or ()))
    except (TypeError, OverflowError):
        return None


def on_curve(parity: Mapping[str, Any]) -> bool:
    """Whether a verdict of equal rests on the loss curve alone."""
    measured = parity.get("measured")
    return measured == "statistical" or (measured is None and parity.get("class") == "STATISTICAL")


def parity_words(parity: Mapping[str, Any]) -> str:
    """The verdict, never a bare "equal" where only the loss curve is: `equal, 2.3 % more steps`."""
    verdict = str(parity.get("verdict"))
    if verdict != "equal" or not on_curve(parity):
        return verdict
    return f"{verdict}, {gap_in_steps(parity) or 'gap in steps not known'}"
