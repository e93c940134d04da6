"""The verdict on a gain, from its confidence interval.

An interval that excludes 1 is a gain or a loss beyond noise. One that contains 1 means one of two things, which must not be
confused: *no gain*, if it is narrow, or *cannot tell*, if it is wide. ×1.22 (0.998 to 1.35) does not prove that there is no
gain.

No torch: pages drawn from a record judge its intervals by this rule too, whatever verdict the record has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from rush.records.parity import parity_verdict

Judgement = Literal["faster", "slower", "no gain", "cannot tell"]

TIGHT = 0.03
"""The verdict is "no gain" if both ends of the interval are within 3 % of 1. Nobody adds a technique for less; and a quiet
machine resolves it with two or three processes per rung: on an H200 intervals of rungs that change nothing are ±0.6 to ±2.6 %
wide, on two busy cores ±5 % and more, which is inconclusive."""
SPEED_VERDICTS = ("equal and faster", "no gain", "cannot tell", "slower")
"""Verdicts of a rung that learns the same and takes as much memory: they follow from the interval alone."""
DIFFERENT = {
    "equal and faster": "faster but different",
    "equal and smaller": "smaller but different",
    "no gain": "different",
    "cannot tell": "different",
    "slower": "different",
}
"""Verdicts of a rung that learns the same, and what they are where it does not."""


def judge(low: float, high: float) -> Judgement:
    """The verdict for a gain with this 95 % interval."""
    if low > 1:
        return "faster"
    if high < 1:
        return "slower"
    return "no gain" if low >= 1 / (1 + TIGHT) and high <= 1 + TIGHT else "cannot tell"


def interval_of(gain: Any) -> tuple[float, float] | None:
    """The interval of a recorded gain; None where there is none, or the record holds something else."""
    ends = gain.get("ci95") if isinstance(gain, Mapping) else None
    if not isinstance(ends, list) or len(ends) != 2:
        return None
    if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in ends):
        return None
    return float(ends[0]), float(ends[1])


def judged_again(verdict: str, gain: Any, parity: Any = None) -> str:
    """A rung's verdict by the current rule, from the interval and the parity in its record; the recorded verdict if they do not
    decide."""
    ends, same = interval_of(gain), parity_verdict(parity)
    found = judge(*ends) if ends is not None else None
    if verdict in SPEED_VERDICTS and found is not None:
        verdict = "equal and faster" if found == "faster" else found
    if same == "different" and verdict in DIFFERENT:
        verdict = DIFFERENT[verdict]
    elif same == "not judged" and verdict in ("equal and faster", "equal and smaller"):
        verdict = DIFFERENT[verdict]  # without a verdict of equal it is not called equal
    return "different" if verdict == "faster but different" and found not in ("faster", None) else verdict


def over_original(gain: Any) -> str:
    """A winner's gain over the recipe it came from, with what its interval says; empty where none was measured."""
    ends = interval_of(gain)
    if ends is None or not isinstance(gain.get("ratio"), int | float):
        return ""
    tail = {"no gain": ", no faster", "cannot tell": ", which cannot be told from none", "slower": ", slower"}
    ratio = f"{gain['ratio']:.2f}× ({ends[0]:.2f} to {ends[1]:.2f}) the speed of the original recipe"
    return ratio + tail.get(judge(*ends), "")
