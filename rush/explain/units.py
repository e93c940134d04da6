"""Numbers with units for the sentences, and comparisons that claim no more than was measured.

Samples taken one after the other in one process are alike, so a difference below five percent is never
called one, however narrow the intervals are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rush.lab.statistics import Floor, Ratio, ratio_of_medians
from rush.report import formatting
from rush.report.formatting import JOIN, digits

LEAST = Floor(0.0, 0, math.log(1.05))

share, si, count = formatting.share, formatting.si, formatting.count
times = formatting.ratio


def size(value: float | None) -> str:
    """Bytes in binary units; exact where they are (`64 KiB`), three digits where they are not."""
    text = formatting.size(value)
    number, join, unit = text.partition(JOIN)
    if value is not None and "." in number and value == float(number) * _UNITS[unit]:
        number = number.rstrip("0").rstrip(".")
    return f"{number}{join}{unit}"


_UNITS = {name: 2.0 ** (10 * power) for power, name in enumerate(("B", "KiB", "MiB", "GiB", "TiB", "PiB"))}


def duration(seconds: float) -> str:
    """`95.2 ns`, `12.3 µs`, `4.56 ms`, `1.23 s`."""
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= unit * 0.9995:
            return f"{digits(seconds / unit)}{JOIN}{name}"
    return f"{digits(seconds * 1e9)}{JOIN}ns"


def bandwidth(bytes_per_s: float) -> str:
    return si(bytes_per_s, "B/s")


def flops(per_s: float) -> str:
    return si(per_s, "FLOP/s")


def span(stat: Mapping[str, Any]) -> str:
    """A timing with its 95 % interval."""
    return f"{duration(stat['median'])} ({duration(stat['low'])} to {duration(stat['high'])})"


def speedup(slow: Mapping[str, Any], fast: Mapping[str, Any]) -> Ratio:
    """How many times faster the second timing is than the first, with its interval."""
    return ratio_of_medians([fast["samples"]], [slow["samples"]], LEAST)


def interval(ratio: Ratio) -> str:
    return formatting.ratio_between(ratio.ratio, (ratio.low, ratio.high))


def listed(parts: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def plain_number(value: int) -> str:
    """A whole number for a table: large ones with thin spaces."""
    return str(value) if value < 10_000 else count(value)
