"""Small charts of lines over sizes or devices, two or three of which stand side by side, each with its legend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rush.report.axes import NARROW, Frame
from rush.report.svg import Scale, path, picture, tag, tooltip, upright_whisker

PANEL = Frame(NARROW.width, 300, right=34, top=26)


@dataclass(frozen=True)
class ChartPoint:
    """One dot with its interval, as the picture shows it."""

    x: float
    y: float
    low: float
    high: float
    description: str


@dataclass(frozen=True)
class ChartLine:
    letter: str
    series: int
    name: str
    ours: bool
    points: tuple[ChartPoint, ...]


@dataclass(frozen=True)
class Chart:
    """A picture and its legend."""

    title: str
    picture: Markup
    lines: tuple[ChartLine, ...]


def scales(x_low: float, x_high: float, air: float, top: float) -> tuple[Scale, Scale]:
    """The logarithmic x scale of a panel, with some air around its range, and the y scale from zero."""
    x = Scale(x_low / air, x_high * air, PANEL.left, PANEL.x_end, log=True)
    return x, Scale(0, top, PANEL.y_end, PANEL.top)


def draw_panel(
    alt: str,
    axes: Sequence[Markup],
    lines: Sequence[ChartLine],
    x: Scale,
    y: Scale,
    over: Sequence[Markup] = (),
) -> Markup:
    """The axes, every line (ours on top), what goes over them, and the letters of the lines."""
    drawn = [mark for line in sorted(lines, key=lambda line: line.ours) for mark in _draw_line(line, x, y)]
    marks = [*axes, *drawn, *over, *_place_letters(lines, x, y)]
    return picture(alt, *marks, class_="curve-picture", viewBox=PANEL.view_box)


def _draw_line(line: ChartLine, x: Scale, y: Scale) -> list[Markup]:
    """A curve with a dot and a whisker at every point."""
    kind = f"series-{line.series}" + (" ours" if line.ours else "")
    marks = [tag("path", class_=f"curve {kind}", d=path([(x(p.x), y(p.y)) for p in line.points]))]
    for point in line.points:
        cx = x(point.x)
        interval = upright_whisker(cx, y(point.low), y(point.high), 0, "whisker thin")
        dot = tag("circle", class_=f"dot {kind}", cx=cx, cy=y(point.y), r=5 if line.ours else 4)
        marks.append(tag("g", tooltip(point.description), interval, dot))
    return marks


def _place_letters(lines: Sequence[ChartLine], x: Scale, y: Scale) -> list[Markup]:
    """Each line's letter beside its last point, pushed apart where they would touch."""
    ends = sorted((y(line.points[-1].y), x(line.points[-1].x), line.letter) for line in lines)
    places: list[float] = []
    for at, _, _ in ends:
        places.append(max(at, places[-1] + 13 if places else at))
    lowest = PANEL.y_end - 6  # above the axis' own labels: the last ones push the others up
    for index in reversed(range(len(places))):
        places[index] = min(places[index], lowest)
        lowest = places[index] - 13
    return [
        tag("text", letter, class_="note strong", x=right + 11, y=place + 4)
        for place, (_, right, letter) in zip(places, ends, strict=True)
    ]
