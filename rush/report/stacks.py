"""Rows of stacked parts: computed memory or time, the expected error, the limit, and published measurements."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from rush.report.panels import StackPart, StackRow, Stacks, label
from rush.report.svg import Scale, number, shortened, tag, text_at, tooltip

LETTER = 6.7
LINE = 19.0
WIDE = 600


def draw_stacks(panel: Stacks, width: float) -> tuple[list[Markup], float, float, str]:
    """The marks, the width, the height, and the picture in words."""
    wide = width > WIDE
    names = max(len(row.name) for row in panel.rows) * LETTER + 16 if wide else 4.0
    names = min(names, width * 0.4)
    words = max(len(row_label(row, panel)) for row in panel.rows) if wide else 2
    ends = [end for row in panel.rows for end in (row.total, row.high, row.measured) if end is not None]
    top = max([*ends, panel.limit.y if panel.limit else 0.0])
    scale = Scale(0, top, names, max(width - words * LETTER - 26, names + 90))
    marks, height = _legend(panel, width)
    first, each = height, (30.0 if wide else 66.0)
    for index, row in enumerate(panel.rows):
        marks += _row(row, panel, scale, first + index * each, width)
    height = first + len(panel.rows) * each + 8
    if panel.limit:
        at = scale(panel.limit.y)
        marks.append(tag("line", class_="stop", x1=at, x2=at, y1=first - 4, y2=height - 6))
    alt = f"{panel.title}. " + "; ".join(f"{row.name}: {row_label(row, panel)}" for row in panel.rows)
    return marks, width, height, alt


def row_label(row: StackRow, panel: Stacks) -> str:
    """The sum, what was measured instead, and the note."""
    text = label(row.total, panel.unit)
    if row.measured is not None:
        text += f", measured {label(row.measured, panel.unit)}"
    return f"{text}, {row.note}" if row.note else text


def _row(row: StackRow, panel: Stacks, scale: Scale, top: float, width: float) -> list[Markup]:
    wide = width > WIDE
    base = top if wide else top + 35
    longest = int(scale.start / LETTER) if wide else int(width / LETTER)
    name = shortened(row.name, max(longest, 12))
    marks = [text_at(0, top + (18 if wide else 13), name, class_="bar-name")]
    at = scale.start
    for part in row.parts:
        end = at + scale(part.value) - scale.start
        words = tooltip(f"{row.name}, {part.name}: {label(part.value, panel.unit)}")
        kind = f"bar predicted series-{part.color}"
        marks.append(tag("rect", words, class_=kind, x=at, y=base + 4, width=max(end - at, 0.5), height=17))
        at = end
    if row.low is not None and row.high is not None:
        low, high = scale(max(row.low, 0.0)), scale(row.high)
        y = base + 12.5
        shape = f"M{number(low)} {number(y)}H{number(high)}M{number(low)} {number(y - 4)}v8M{number(high)} {number(y - 4)}v8"
        marks.append(tag("path", class_="whisker", d=shape))
        at = max(at, high)
    if row.measured is not None:
        found = scale(row.measured)
        words = tooltip(f"{row.name}, measured: {label(row.measured, panel.unit)}")
        marks.append(tag("g", words, diamond(found, base + 12.5)))
        at = max(at, found + 6)
    said = row_label(row, panel)
    if wide:
        marks.append(text_at(at + 8, base + 17, said, class_="note strong"))
    else:  # under the name, where a bar may end anywhere
        marks.insert(1, text_at(0, top + 30, shortened(said, longest), class_="note strong"))
    return marks


def diamond(x: float, y: float) -> Markup:
    """The mark of a measurement."""
    return tag("path", class_="mark", d=f"M{number(x)} {number(y)}m0 -6l6 6l-6 6l-6 -6z")


def _legend(panel: Stacks, width: float) -> tuple[list[Markup], float]:
    """Every part, the interval, the limit and the measurements, in as many rows as they need."""
    parts: dict[str, StackPart] = {}
    for row in panel.rows:
        for part in row.parts:
            parts.setdefault(part.name, part)
    entries: list[tuple[str, Sequence[Markup]]] = [
        (
            part.name,
            [tag("rect", class_=f"bar predicted series-{part.color}", x=0, y=-6, width=18, height=12)],
        )
        for part in parts.values()
    ]
    if panel.interval:
        entries.append((panel.interval, [tag("path", class_="whisker", d="M0 0H18M0 -4v8M18 -4v8")]))
    if panel.limit:
        entries.append((panel.limit.label, [tag("line", class_="stop", x1=9, x2=9, y1=-8, y2=8)]))
    if panel.measured:
        entries.append((panel.measured, [diamond(9, 0)]))
    marks, x, y = [], 0.0, 12.0
    for name, shapes in entries:
        room = 26 + len(name) * LETTER
        if x and x + room > width:
            x, y = 0.0, y + LINE
        marks.append(tag("g", *shapes, transform=f"translate({number(x)} {number(y)})"))
        marks.append(text_at(x + 24, y + 4, name, class_="tick"))
        x += room + 14
    return marks, y + 18
