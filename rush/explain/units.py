"""Numbers with units for the sentences, and comparisons that claim no more than was measured.

Samples taken one after the other in one process are alike, so a difference below five percent is never
called one, however narrow the intervals are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rush.lab.statistics import Floor, Ratio, ratio_of_medians
from rush.report import formatting, panels

LEAST = Floor(0.0, 0, math.log(1.05))

share, si, times = formatting.share, formatting.si, formatting.ratio
duration, size, plain_number = panels.duration, panels.size, panels.plain_number


def bandwidth(bytes_per_s: float) -> str:
    return si(bytes_per_s, "B/s")


def flops(per_s: float) -> str:
    return si(per_s, "FLOP/s")


def flops_of(number: float) -> str:
    """An amount of them, not a rate."""
    return si(number, "FLOP")


def span(stat: Mapping[str, Any]) -> str:
    """A timing with its 95 % interval."""
    return f"{duration(stat['median'])} ({duration(stat['low'])} to {duration(stat['high'])})"


def speedup(slow: Mapping[str, Any], fast: Mapping[str, Any]) -> Ratio:
    """How many times faster the second timing is than the first, with its interval."""
    if not (slow["samples"] and fast["samples"]):
        raise ValueError("a timing has no samples")
    return ratio_of_medians([fast["samples"]], [slow["samples"]], LEAST)


def interval(ratio: Ratio) -> str:
    return formatting.ratio_between(ratio.ratio, (ratio.low, ratio.high))


def listed(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
