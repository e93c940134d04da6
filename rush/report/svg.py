"""SVG drawing tools: elements that escape their content, scales and ticks.

Charts are inline SVG, so the file stays small, prints sharply and needs no script. The SVG contains no colors: an element has a
class, the style sheet gives the class its color, and the same chart serves light mode, dark mode and print.

A bar is drawn in percentages of its own width (an `svg` without a view box), so it fills whatever column
the page gives it while its text keeps its size. Curves need coordinates and use a view box.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape


def tag(name: str, *children: str, **attributes: str | float | None) -> Markup:
    """One element. `class_` means class, other underscores become hyphens; None leaves the attribute out.

    Children that are not Markup are text and get escaped.
    """
    parts = [name]
    for key, value in attributes.items():
        if value is not None:
            text = value if isinstance(value, str) else number(value)
            parts.append(f'{key.rstrip("_").replace("_", "-")}="{escape(text)}"')
    inner = Markup("").join(escape(child) for child in children)
    return Markup(f"<{' '.join(parts)}>{inner}</{name}>")


def number(value: float) -> str:
    """A coordinate with at most two decimals; the shortest spelling, the same on every machine."""
    assert math.isfinite(value), f"a coordinate must be finite, not {value}"
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


def percent(value: float) -> str:
    return f"{number(value)}%"


def picture(alt: str, *children: str, **attributes: str | float | None) -> Markup:
    """A complete picture, with a text description for screen readers."""
    return tag("svg", *children, role="img", aria_label=alt, **attributes)


def svg_file(alt: str, width: float, height: float, *children: str) -> str:
    """A standalone picture, as the content of a file."""
    box = f"0 0 {number(width)} {number(height)}"
    return str(
        picture(alt, *children, xmlns="http://www.w3.org/2000/svg", viewBox=box, width=width, height=height)
    )


def text_at(
    x: float | str, y: float, *words: str, class_: str | None = None, anchor: str | None = None
) -> Markup:
    return tag("text", *words, class_=class_, x=x, y=y, text_anchor=anchor)


def whisker(low: float | str, high: float | str, middle: float, half: float) -> list[Markup]:
    """An interval: a line with a cap at either end."""
    ends = ((low, high, middle, middle), *((x, x, middle - half, middle + half) for x in (low, high)))
    return [tag("line", class_="whisker", x1=x1, x2=x2, y1=y1, y2=y2) for x1, x2, y1, y2 in ends]


def upright_whisker(x: float, low: float, high: float, half: float, class_: str = "whisker") -> Markup:
    """The same of a point in a chart, from `low` to `high` in the picture."""
    caps = (
        "".join(f"M{number(x - half)} {number(end)}h{number(2 * half)}" for end in (low, high))
        if half
        else ""
    )
    return tag("path", class_=class_, d=f"M{number(x)} {number(low)}V{number(high)}{caps}")


def tooltip(text: str) -> Markup:
    """What a browser shows when the pointer rests on the element this is put into."""
    return tag("title", text)


def shortened(text: str, most: int) -> str:
    """SVG text does not wrap: what is too long ends in an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


@dataclass(frozen=True)
class Scale:
    """Maps low…high to start…end, straight or by the logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __post_init__(self) -> None:
        assert self.low < self.high, f"an empty scale: {self.low} to {self.high}"
        assert not self.log or self.low > 0, f"a logarithmic scale cannot begin at {self.low}"

    def __call__(self, value: float) -> float:
        if self.log:
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) inside low…high, about so many."""
    assert low < high
    raw = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((power * k for k in (1, 2, 2.5, 5, 10) if power * k >= raw), power * 10)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def binary_unit(value: float) -> float:
    """The largest of GiB, MiB and KiB that the value reaches, in bytes."""
    return next((unit for unit in (2.0**30, 2.0**20, 2.0**10) if value >= unit), 1.0)


def decades(low: float, high: float, at_most: int = 7) -> list[float]:
    """Powers of ten inside low…high, thinned out evenly when there are too many."""
    assert 0 < low <= high
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / at_most))
    return [10.0**k for k in range(first, last + 1, step)]


def widened(values: Sequence[float], margin: float = 0.06) -> tuple[float, float]:
    """The range of the values with some air around it; never empty, even when all are the same."""
    low, high = min(values), max(values)
    air = (high - low) * margin or abs(high) * margin or 1.0
    return low - air, high + air


def path(points: Sequence[tuple[float, float]]) -> str:
    """The `d` of a polyline."""
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in points)
