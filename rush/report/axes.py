"""The frame of a curve: plot area, grid lines, tick labels.

A picture with a view box shrinks with its column, and its text with it: a wide picture is unreadable on a
phone. So a large picture is drawn twice, for a wide and for a narrow column, and the page shows the one
that fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rush.report.svg import Scale, tag


@dataclass(frozen=True)
class Frame:
    """The size of a picture and the edges of its plot area."""

    width: float
    height: float
    left: float = 58
    right: float = 14
    top: float = 14
    bottom: float = 40

    @property
    def x_end(self) -> float:
        return self.width - self.right

    @property
    def y_end(self) -> float:
        return self.height - self.bottom

    @property
    def view_box(self) -> str:
        return f"0 0 {self.width:g} {self.height:g}"


WIDE = Frame(1040, 420)
NARROW = Frame(350, 340)


def y_axis(
    frame: Frame, scale: Scale, at: Sequence[float], label: Callable[[float], str], title: str
) -> list[Markup]:
    """Horizontal grid lines with their labels at the left, and what is measured above them."""
    above = min(
        12, max(6, frame.top - 10)
    )  # clear of the label of a grid line at the top, where there is room
    marks = [tag("text", title, class_="axis-title", x=2, y=frame.top - above)]
    for value in at:
        y = scale(value)
        marks.append(tag("line", class_="grid", x1=frame.left, x2=frame.x_end, y1=y, y2=y))
        marks.append(tag("text", label(value), class_="tick", x=frame.left - 7, y=y + 4, text_anchor="end"))
    return marks


def x_axis(
    frame: Frame, scale: Scale, at: Sequence[float], label: Callable[[float], str], title: str
) -> list[Markup]:
    """Ticks and labels under the plot area; labels that would touch the one before are left out."""
    base = frame.y_end
    marks = [tag("line", class_="axis", x1=frame.left, x2=frame.x_end, y1=base, y2=base)]
    last = -math.inf
    for value in at:
        x, word = scale(value), label(value)
        marks.append(tag("line", class_="axis", x1=x, x2=x, y1=base, y2=base + 4))
        half = len(word) * 3.6
        if x - half > last:
            marks.append(tag("text", word, class_="tick", x=x, y=base + 18, text_anchor="middle"))
            last = x + half + 4
    marks.append(tag("text", title, class_="axis-title", x=frame.x_end, y=base + 34, text_anchor="end"))
    return marks


def free_spot(
    frame: Frame,
    cx: float,
    cy: float,
    taken: Sequence[tuple[float, float]],
    reaches: Sequence[float],
    directions: Sequence[tuple[float, float]],
    apart: float,
) -> tuple[float, float] | None:
    """The nearest free position around a dot for its label, inside the plot and `apart` from existing labels."""
    for reach in reaches:
        for dx, dy in directions:
            spot = (cx + dx * reach, cy + dy * reach)
            inside = frame.left + 4 < spot[0] < frame.x_end - 4 and frame.top < spot[1] < frame.y_end - 6
            if inside and all(math.dist(spot, other) > apart for other in taken):
                return spot
    return None
