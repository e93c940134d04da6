"""Panels as plain data: curves and bars with their numbers and units, without layout.

`panel_svg.py` draws a panel for a page, `panel_file.py` several of them into an SVG file, and the terminal with characters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rush.report import formatting
from rush.report.formatting import JOIN, digits
from rush.report.svg import binary_unit, ticks

Unit = Literal["", "B", "B/s", "FLOP/s", "s", "%", "×"]
Style = Literal["measured", "formula", "extrapolated", "dots", "line", "faint", "hollow", "crosses"]


@dataclass(frozen=True)
class Dot:
    """A point with its interval. `label` stands beside it, `note` appears when the pointer rests on it."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    label: str = ""
    note: str = ""


@dataclass(frozen=True)
class Curve:
    """A series. Measured ones are solid with marks, formulas and extrapolations dashed, dots not joined; lines have no marks.
    Computed points have hollow marks (extrapolated; hollow ones are not joined); crosses mark impossible
    ones. A series without a name is not in the legend."""

    name: str
    dots: Sequence[Dot]
    color: int
    style: Style = "measured"


@dataclass(frozen=True)
class Mark:
    """A mark on the x axis, such as the size of a cache."""

    x: float
    label: str


@dataclass(frozen=True)
class Level:
    """A mark on the y axis, such as the memory of a device."""

    y: float
    label: str


@dataclass(frozen=True)
class Curves:
    title: str
    x_title: str
    y_title: str
    x_unit: Unit
    y_unit: Unit
    lines: Sequence[Curve]
    x_log: bool = True
    y_log: bool = True
    y_from_zero: bool = True
    """Range of a linear axis. A loss curve far from zero needs its own."""
    marks: Sequence[Mark] = ()
    caption: str = ""
    levels: Sequence[Level] = ()


@dataclass(frozen=True)
class Bar:
    """One row. With `start` the bar is a range from there to `value`. Without a value the note says why."""

    name: str
    value: float | None
    low: float | None = None
    high: float | None = None
    color: int = 1
    note: str = ""
    start: float | None = None


@dataclass(frozen=True)
class Bars:
    title: str
    unit: Unit
    rows: Sequence[Bar]
    log: bool = False
    caption: str = ""


@dataclass(frozen=True)
class StackPart:
    name: str
    value: float
    color: int


@dataclass(frozen=True)
class StackRow:
    """Parts side by side; `low` and `high` are the interval of their sum, `measured` what somebody found instead of it."""

    name: str
    parts: Sequence[StackPart]
    low: float | None = None
    high: float | None = None
    measured: float | None = None
    note: str = ""

    @property
    def total(self) -> float:
        return sum(part.value for part in self.parts)


@dataclass(frozen=True)
class Stacks:
    """Rows of computed parts. They are drawn pale, with a broken outline; what was measured is a dark diamond."""

    title: str
    unit: Unit
    rows: Sequence[StackRow]
    limit: Level | None = None
    interval: str = ""
    """What the whiskers are, for the legend."""
    measured: str = ""
    """What the diamonds are."""
    caption: str = ""


Panel = Curves | Bars | Stacks


def label(value: float, unit: Unit) -> str:
    """A human-readable value with its unit."""
    if unit == "s":
        return duration(value)
    if unit == "B":
        return size(value)
    if unit == "%":
        return formatting.share(value)
    if unit == "×":
        return formatting.ratio(value)
    if unit == "" and value == int(value) and abs(value) < 1e6:
        return plain_number(int(value))
    return formatting.si(value, unit)


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


def plain_number(value: int) -> str:
    """A whole number for a table: large ones with thin spaces."""
    return str(value) if value < 10_000 else formatting.count(value)


def dot(x: float, stat: Mapping[str, Any], amount: float | None = None, *, note: str = "") -> Dot:
    """A timing as a point: its seconds, or with `amount` the rate of so much done in them."""
    if amount is None:
        return Dot(x, stat["median"], stat["low"], stat["high"], note=note)
    return Dot(x, amount / stat["median"], amount / stat["high"], amount / stat["low"], note=note)


def bar(name: str, stat: Mapping[str, Any], color: int, amount: float | None = None) -> Bar:
    """The same as a row of bars."""
    found = dot(0.0, stat, amount)
    return Bar(name, found.y, found.low, found.high, color)


def tick_values(low: float, high: float, log: bool, unit: Unit, about: int = 6) -> list[float]:
    """Round places on an axis: powers of two for bytes, 1-2-5 steps or powers of ten on a logarithmic one."""
    if unit == "B" and log:
        first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
        step = max(1, math.ceil((last - first + 1) / about))
        return [2.0**k for k in range(first, last + 1, step)]
    if not log:
        scale = binary_unit(high) if unit == "B" else 1.0
        return [value * scale for value in ticks(low / scale, high / scale, about)]
    tens = [10.0**k for k in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    if len(tens) >= 3:
        return tens[:: max(1, math.ceil(len(tens) / about))]
    start = math.floor(math.log10(low))
    steps = [m * 10.0**k for k in range(start, start + 4) for m in (1, 2, 5)]
    inside = [value for value in steps if low <= value <= high]
    return inside if len(inside) >= 2 else ticks(low, high, 4)
