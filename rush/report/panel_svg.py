"""Panels as SVG, with the report's own tools: classes instead of colors, escaped text, a wide and a narrow form.

A series differs from the others by the shape of its marks as well as by its color, and named in a legend
above the plot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rush.report import formatting
from rush.report.axes import NARROW, WIDE, Frame, free_spot, x_axis, y_axis
from rush.report.panels import (
    Bar,
    Bars,
    Curve,
    Curves,
    Dot,
    Level,
    Mark,
    Panel,
    Stacks,
    Unit,
    label,
    tick_values,
)
from rush.report.svg import (
    Scale,
    number,
    path,
    picture,
    shortened,
    tag,
    text_at,
    tooltip,
    upright_whisker,
    widened,
)

LETTER = 6.7
"""About how wide a letter of the small text is."""
REACHES = (14.0, 21.0, 29.0, 38.0)
DIRECTIONS = [(math.cos(math.pi / 4 * turn), -math.sin(math.pi / 4 * turn)) for turn in range(8)]
UNMARKED = ("formula", "line", "faint")
"""Styles of lines without a mark at each point."""
UNJOINED = ("dots", "hollow", "crosses")
HOLLOW = ("extrapolated", "hollow")
SHAPES = ("circle", "square", "triangle", "diamond", "ring", "bar")


@dataclass(frozen=True)
class Drawn:
    """A panel's elements and the room they take."""

    marks: list[Markup]
    width: float
    height: float
    alt: str


def pictures(panel: Panel) -> tuple[Markup, Markup]:
    """A panel for a wide and for a narrow column."""
    wide, narrow = (
        picture(
            drawn.alt, *drawn.marks, class_="curve-picture", viewBox=f"0 0 {drawn.width:g} {drawn.height:g}"
        )
        for drawn in (draw(panel, WIDE.width), draw(panel, NARROW.width))
    )
    return wide, narrow


def draw(panel: Panel, width: float) -> Drawn:
    if isinstance(panel, Stacks):
        from rush.report.stacks import draw_stacks

        return Drawn(*draw_stacks(panel, width))
    return _curves(panel, width) if isinstance(panel, Curves) else _bars(panel, width)


def short(value: float, unit: Unit) -> str:
    """A label on an axis, without the zeros that show the precision of a measurement."""
    text = label(value, unit)
    if value == 0:
        return "0"
    if unit == "":
        return text if text.replace(formatting.THIN, "").isdigit() else formatting.tick(value)
    head, join, tail = text.partition(formatting.JOIN)
    if "." in head and "e" not in head:
        head = head.rstrip("0").rstrip(".")
    return f"{head}{join}{tail}"


def _curves(panel: Curves, width: float) -> Drawn:
    legend, legend_height = _legend(panel.lines, width)
    plot = 320.0 if width > 600 else 260.0
    top = legend_height + 26
    left = 14 + LETTER * max(len(short(v, panel.y_unit)) for v in _y_ticks(panel))
    frame = Frame(width, top + plot + 44, left=max(46.0, left), right=16, top=top, bottom=44)
    x, y = _scales(panel, frame)
    marks = [*legend, *y_axis(frame, y, _y_ticks(panel), lambda v: short(v, panel.y_unit), panel.y_title)]
    marks += x_axis(frame, x, _x_ticks(panel), lambda v: short(v, panel.x_unit), panel.x_title)
    marks += [*_places(panel.marks, frame, x), *_levels(panel.levels, frame, y)]
    for line in panel.lines:
        marks += _line(line, panel, x, y)
    marks += _labels(panel.lines, frame, x, y)
    return Drawn(marks, width, frame.height, _alt(panel))


def _places(marked: Sequence[Mark], frame: Frame, x: Scale) -> list[Markup]:
    """Dashed lines with their names, each a little lower than the last, so that neighbors do not meet."""
    marks = []
    inside = [mark for mark in marked if x.low <= mark.x <= x.high]
    for index, mark in enumerate(inside):
        place, down = x(mark.x), frame.top + 10 + 15 * (index % 4)
        flip = place > frame.x_end - len(mark.label) * LETTER
        marks.append(tag("line", class_="stop", x1=place, x2=place, y1=frame.top, y2=frame.y_end))
        beside, anchor = (place - 5, "end") if flip else (place + 5, "start")
        marks.append(text_at(beside, down, mark.label, class_="note", anchor=anchor))
    return marks


def _levels(levels: Sequence[Level], frame: Frame, y: Scale) -> list[Markup]:
    marks = []
    for level in levels:
        at = y(level.y)
        marks.append(tag("line", class_="stop", x1=frame.left, x2=frame.x_end, y1=at, y2=at))
        marks.append(text_at(frame.left + 6, at - 5, level.label, class_="note"))
    return marks


def _ranges(panel: Curves) -> tuple[float, float, float, float]:
    xs = [dot.x for line in panel.lines for dot in line.dots]
    dots = [dot for line in panel.lines for dot in line.dots]
    ys = [y for dot in dots for y in (dot.y, dot.low, dot.high) if y is not None]
    ys += [level.y for level in panel.levels]
    return min(xs), max(xs), min(ys), max(ys)


def _scales(panel: Curves, frame: Frame) -> tuple[Scale, Scale]:
    x_low, x_high, _, _ = _ranges(panel)
    if panel.x_log:
        air = max(1.12, (x_high / x_low) ** 0.03)
        x = Scale(x_low / air, x_high * air, frame.left, frame.x_end, log=True)
    else:
        air = (x_high - x_low) * 0.04 or 1.0
        x = Scale(x_low - air, x_high + air, frame.left, frame.x_end)
    low, high = _y_range(panel)
    return x, Scale(low, high, frame.y_end, frame.top, log=panel.y_log)


def _y_range(panel: Curves) -> tuple[float, float]:
    _, _, low, high = _ranges(panel)
    if panel.y_log:
        air = max(1.25, (high / low) ** 0.06)
        return low / air, high * air
    if not panel.y_from_zero:
        return widened([low, high])
    return 0.0, high * 1.08 or 1.0


def _y_ticks(panel: Curves) -> list[float]:
    return tick_values(*_y_range(panel), panel.y_log, panel.y_unit)


def _x_ticks(panel: Curves) -> list[float]:
    """The measured sizes where they are whole and few enough to be read, else round places."""
    joined = [line for line in panel.lines if line.style in ("measured", "extrapolated", "hollow")]
    xs = sorted({dot.x for line in joined for dot in line.dots})
    if panel.x_log and 1 < len(xs) <= 24 and all(x == int(x) for x in xs):
        return xs
    x_low, x_high, _, _ = _ranges(panel)
    if x_low == x_high:
        return [x_low]
    return tick_values(x_low, x_high, panel.x_log, panel.x_unit)


def _line(line: Curve, panel: Curves, x: Scale, y: Scale) -> list[Markup]:
    """A line, with marks where its style has them; one of a single point is a mark."""
    marks = []
    if line.style not in UNJOINED and len(line.dots) > 1:
        points = [(x(dot.x), y(dot.y)) for dot in line.dots]
        marks.append(tag("path", class_=f"curve series-{line.color} {line.style}", d=path(points)))
    if line.style in UNMARKED and (len(line.dots) > 1 or line.style != "line"):
        return marks
    return marks + [_dot(line, dot, panel, x(dot.x), y) for dot in line.dots]


def _dot(line: Curve, dot: Dot, panel: Curves, cx: float, y: Scale) -> Markup:
    description = f"{line.name}, {label(dot.x, panel.x_unit)}: {label(dot.y, panel.y_unit)}"
    parts = [tooltip(f"{description}. {dot.note}" if dot.note else description)]
    if dot.low is not None and dot.high is not None:
        low, high = (y(max(value, y.low)) for value in (dot.low, min(dot.high, y.high)))
        if low - high > 3:
            parts.append(upright_whisker(cx, low, high, 3))
    parts.append(_mark(line, cx, y(dot.y)))
    return tag("g", *parts)


def _mark(line: Curve, cx: float, cy: float) -> Markup:
    """The mark of a point of this series."""
    if line.style == "crosses":
        return tag("path", class_="cross", d=f"M{number(cx - 5)} {number(cy - 5)}l10 10m0 -10l-10 10")
    hollow = " hollow" if line.style in HOLLOW else ""
    return shape(line.color, cx, cy, f"dot series-{line.color}{hollow}")


def shape(color: int, cx: float, cy: float, class_: str) -> Markup:
    """The mark of a series: another shape for each color."""
    kind = SHAPES[(color - 1) % len(SHAPES)]
    if kind in ("circle", "ring"):
        return tag("circle", class_=class_, cx=cx, cy=cy, r=4.2 if kind == "circle" else 3)
    at = f"M{number(cx)} {number(cy)}"
    forms = {
        "square": "m-4 -4h8v8h-8z",
        "triangle": "m0 -5l5 9h-10z",
        "diamond": "m0 -5.5l5.5 5.5l-5.5 5.5l-5.5 -5.5z",
        "bar": "m-5.5 -2.5h11v5h-11z",
    }
    return tag("path", class_=class_, d=at + forms[kind])


def _legend(lines: Sequence[Curve], width: float) -> tuple[list[Markup], float]:
    """The names of the series over the plot, in as many rows as they need."""
    marks, x, y = [], 4.0, 12.0
    named = [line for line in lines if line.name]
    for line in named:
        room = 34 + len(line.name) * LETTER
        if x > 4 and x + room > width:
            x, y = 4.0, y + 19
        if line.style not in UNJOINED:
            stroke = f"curve series-{line.color} {line.style}"
            marks.append(tag("path", class_=stroke, d=f"M{number(x)} {number(y)}h20"))
        if line.style not in UNMARKED:
            marks.append(_mark(line, x + 10, y))
        marks.append(tag("text", line.name, class_="tick", x=x + 26, y=y + 4))
        x += room + 12
    return marks, y + 8 if named else 0.0


def _labels(lines: Sequence[Curve], frame: Frame, x: Scale, y: Scale) -> list[Markup]:
    """The short labels of single dots, each on the first side that is free."""
    taken = [(x(dot.x), y(dot.y)) for line in lines if line.style == "dots" for dot in line.dots]
    marks = []
    for line in lines:
        for dot in line.dots:
            if dot.label and (spot := free_spot(frame, x(dot.x), y(dot.y), taken, REACHES, DIRECTIONS, 12)):
                taken.append(spot)
                marks.append(text_at(spot[0], spot[1] + 4, dot.label, class_="note strong", anchor="middle"))
    return marks


def _alt(panel: Curves) -> str:
    """The picture in words: each series from its first to its last point."""
    parts = []
    for line in panel.lines:
        name = line.name or panel.y_title
        if line.style in UNJOINED:
            description = ", ".join(
                f"{dot.label or label(dot.x, panel.x_unit)} at {label(dot.y, panel.y_unit)}"
                for dot in line.dots
            )
            parts.append(f"{name}: {description}")
        elif line.style != "formula":
            first, last = line.dots[0], line.dots[-1]
            parts.append(
                f"{name}: {label(first.y, panel.y_unit)} at {label(first.x, panel.x_unit)}, "
                f"{label(last.y, panel.y_unit)} at {label(last.x, panel.x_unit)}"
            )
    return f"{panel.title}. {panel.y_title} against {panel.x_title}. {'; '.join(parts)}."


def _bars(panel: Bars, width: float) -> Drawn:
    """Names at the left of the bars on a wide page, above them on a narrow one."""
    wide = width > 600
    names = max(len(row.name) for row in panel.rows) * LETTER + 16 if wide else 4.0
    names = min(names, width * 0.42)
    labels = [bar_label(row, panel.unit) for row in panel.rows if row.value is not None]
    room = max(map(len, labels), default=0) * 7.4 + 22
    scale = bar_scale(panel, names, max(width - room, names + 60))
    row_height, marks = (28.0 if wide else 44.0), []
    for index, row in enumerate(panel.rows):
        marks += _bar(row, panel, scale, index * row_height, width)
    alt = f"{panel.title}. " + "; ".join(f"{row.name}: {bar_label(row, panel.unit)}" for row in panel.rows)
    return Drawn(marks, width, len(panel.rows) * row_height + 8, alt)


def bar_scale(panel: Bars, start: float, end: float) -> Scale:
    tops = [v for row in panel.rows for v in (row.value, row.high, row.start) if v is not None]
    if not tops:
        return Scale(0, 1, start, end)
    if panel.log:
        lows = [v for row in panel.rows for v in (row.value, row.low, row.start) if v is not None]
        return Scale(min(lows) / 1.5, max(tops) * 1.5, start, end, log=True)
    return Scale(0, max(tops) or 1.0, start, end)


def bar_label(row: Bar, unit: Unit) -> str:
    if row.value is None:
        return row.note or formatting.MISSING
    value = label(row.value, unit)
    if row.start is not None:
        value = f"{label(row.start, unit)} to {value}"
    return f"{value}, {row.note}" if row.note else value


def _bar(row: Bar, panel: Bars, scale: Scale, top: float, width: float) -> list[Markup]:
    description = f"{row.name}: {bar_label(row, panel.unit)}"
    wide = width > 600
    base = top if wide else top + 18
    marks = [tag("text", shortened(row.name, 46), class_="bar-name", x=0, y=top + (17 if wide else 14))]
    if row.value is None:
        most = max(12, int((width - scale.start) / LETTER))
        why = shortened(row.note or formatting.MISSING, most)
        marks.append(tag("text", tooltip(description), why, class_="soft", x=scale.start, y=base + 17))
        return marks
    start = scale(row.start) if row.start is not None else scale.start
    end = scale(row.value)
    kind, long = f"bar series-{row.color}", max(end - start, 1.0)
    marks.append(
        tag("rect", tooltip(description), class_=kind, x=start, y=base + 3, width=long, height=17, rx=2)
    )
    if row.low is not None and row.high is not None:
        low, high = scale(max(row.low, scale.low)), scale(row.high)
        shape_ = f"M{number(low)} {number(base + 11.5)}H{number(high)}M{number(low)} {number(base + 7)}v9M{number(high)} {number(base + 7)}v9"
        marks.append(tag("path", class_="whisker", d=shape_))
        end = max(end, high)
    marks.append(tag("text", bar_label(row, panel.unit), class_="value", x=end + 8, y=base + 17))
    return marks
