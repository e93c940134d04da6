"""Panels with characters: a compact chart for the terminal, the numbers under it, then the sentences."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rush.explain.topic import TopicTable
from rush.report.panel_svg import bar_label, bar_scale, short
from rush.report.panels import Bar, Bars, Curves, Panel, Stacks, tick_values

SIGNS = "●■▲◆○▬"
COLORS = ("blue", "red", "green", "magenta", "yellow", "white")
ROWS = 11


def show(
    console: Console, title: str, where: str, panels: Sequence[Panel], table: TopicTable, words: Sequence[str]
) -> None:
    console.print(Text(title, style="bold"), Text(where, style="dim"), sep="\n")
    for panel in panels:
        console.print()
        console.print(Text(panel.title, style="bold"))
        width = max(40, min(100, console.width))
        console.print(curves(panel, width) if isinstance(panel, Curves) else bars(panel, width))
        if panel.caption:
            console.print(Text(panel.caption, style="dim"))
    console.print()
    console.print(numbers(table))
    console.print()
    for sentence in words:
        console.print(Padding(Text(sentence), (0, 0, 1, 0)))


def numbers(table: TopicTable) -> Table:
    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(table.columns):
        left = index == 0 or any(len(row[index]) > 34 for row in table.rows)
        drawn.add_column(name, justify="left" if left else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn


def curves(panel: Curves, width: int) -> Text:
    """A grid of characters; where two series meet, the later one covers the earlier."""
    xs = [dot.x for line in panel.lines for dot in line.dots]
    ys = [dot.y for line in panel.lines for dot in line.dots]
    y_low = min(ys) if panel.y_log else 0.0
    ticks = tick_values(y_low, max(ys), panel.y_log, panel.y_unit, 4) if max(ys) > y_low else [y_low]
    margin = max(len(short(value, panel.y_unit)) for value in ticks)
    columns = width - margin - 3
    across = _mapping(min(xs), max(xs), columns - 1, panel.x_log)
    up = _mapping(y_low, max(ys), ROWS - 1, panel.y_log)
    grid: list[list[tuple[str, str]]] = [[(" ", "")] * columns for _ in range(ROWS)]
    for line in panel.lines:
        color = COLORS[(line.color - 1) % len(COLORS)]
        places = [(across(dot.x), up(dot.y)) for dot in line.dots]
        if line.style != "dots":
            for first, second in itertools.pairwise(places):
                for column, row in _between(first, second):
                    grid[row][column] = ("·", color)
        if line.style != "formula":
            for dot, (column, row) in zip(line.dots, places, strict=True):
                grid[row][column] = (dot.label[:1] or SIGNS[(line.color - 1) % len(SIGNS)], color)
                if len(dot.label) > 1 and column + 1 < columns:
                    grid[row][column + 1] = (dot.label[1], color)
    labels = {up(value): short(value, panel.y_unit) for value in ticks}
    text = Text()
    for line in panel.lines:
        sign = "··" if line.style == "formula" else SIGNS[(line.color - 1) % len(SIGNS)]
        text.append(f"{sign} ", COLORS[(line.color - 1) % len(COLORS)])
        text.append(f"{line.name}   ")
    text.append("\n")
    for row in reversed(range(ROWS)):
        text.append(f"{labels.get(row, ''):>{margin}} │", "dim")
        for character, color in grid[row]:
            text.append(character, color)
        text.append("\n")
    text.append(f"{'':>{margin}} └{'─' * columns}\n", "dim")
    ends = short(min(xs), panel.x_unit), short(max(xs), panel.x_unit)
    middle = panel.x_title.center(max(0, columns - len(ends[0]) - len(ends[1])))
    text.append(f"{'':>{margin}}  {ends[0]}{middle}{ends[1]}", "dim")
    text.append(f"\n{'':>{margin}}  (up: {panel.y_title})", "dim")
    return text


def _mapping(low: float, high: float, cells: int, log: bool) -> Callable[[float], int]:
    if high <= low:
        return lambda value: cells // 2
    if log:
        reach = math.log(high / low)
        return lambda value: min(cells, max(0, round(math.log(value / low) / reach * cells)))
    return lambda value: min(cells, max(0, round((value - low) / (high - low) * cells)))


def _between(first: tuple[int, int], second: tuple[int, int]) -> list[tuple[int, int]]:
    steps = max(abs(second[0] - first[0]), abs(second[1] - first[1]), 1)
    return [
        (
            round(first[0] + (second[0] - first[0]) * k / steps),
            round(first[1] + (second[1] - first[1]) * k / steps),
        )
        for k in range(steps + 1)
    ]


def bars(panel: Bars | Stacks, width: int) -> Text:
    if isinstance(panel, Stacks):  # with characters a row is as long as its parts together
        rows = [Bar(row.name, row.total, color=row.parts[0].color, note=row.note) for row in panel.rows]
        panel = Bars(panel.title, panel.unit, rows)
    margin = min(34, max(len(row.name) for row in panel.rows))
    room = max(12, width - margin - 3 - max(len(bar_label(row, panel.unit)) for row in panel.rows))
    scale = bar_scale(panel, 0, room)
    text = Text()
    for index, row in enumerate(panel.rows):
        text.append(f"{row.name[:margin]:<{margin}} ")
        if row.value is not None:
            start = round(scale(row.start)) if row.start is not None else 0
            length = max(1, round(scale(row.value)) - start)
            text.append(" " * start + "█" * length, COLORS[(row.color - 1) % len(COLORS)])
        text.append(f" {bar_label(row, panel.unit)}" + ("\n" if index < len(panel.rows) - 1 else ""))
    return text
