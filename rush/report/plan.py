"""A plan as a page: memory against the device's limit, time by part, and why other ways lose. From a record only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from rush.files import write_atomic
from rush.report import formatting
from rush.report.page import render
from rush.report.svg import percent, picture, tag, tooltip

KINDS = ("matmul", "attention", "norm_elementwise", "loss", "optimizer", "data", "other", "idle")
"""The classes of the style sheet, borrowed for parts in the order they come."""


def write_plan(html: Path, name: str, plans: Sequence[Mapping[str, Any]], lost: Sequence[str]) -> None:
    """Draw one or a few plans, as `rush plan --json` gives them, into one self-contained file."""
    write_atomic(html, plan_page(name, plans, lost))


def plan_page(name: str, plans: Sequence[Mapping[str, Any]], lost: Sequence[str]) -> str:
    return render(
        "plan.html",
        title=f"{name} · plan",
        name=name,
        plans=[(plan, _memory(plan), _time(plan)) for plan in plans],
        lost=lost,
        percent=lambda value: f"{100 * value:.0f} %",
    )


def _memory(plan: Mapping[str, Any]) -> tuple[Markup, list[tuple[str, str]]]:
    parts = {k: float(v) for k, v in plan["memory_bytes"].items() if k not in ("total", "tensors")}
    limit = float(plan["machine"]["memory_bytes"])
    return _stacked(parts, max(limit, sum(parts.values())), limit, formatting.size), [
        (part, formatting.size(value)) for part, value in parts.items()
    ]


def _time(plan: Mapping[str, Any]) -> tuple[Markup, list[tuple[str, str]]]:
    parts = {k: float(v) for k, v in plan["time_s"].items() if k != "step"}

    def say(seconds: float) -> str:
        return f"{1e3 * seconds:,.1f} ms"

    return _stacked(parts, sum(parts.values()), None, say), [
        (part, say(value)) for part, value in parts.items()
    ]


def _stacked(parts: Mapping[str, float], whole: float, limit: float | None, say: Any) -> Markup:
    """Parts side by side, in percent of the column, and a line at the limit."""
    at, marks = 0.0, []
    alt = ", ".join(f"{part} {say(value)}" for part, value in parts.items())
    for number, (part, value) in enumerate(parts.items()):
        share = 100 * value / whole
        words, kind = tooltip(f"{part}: {say(value)}"), f"part {KINDS[number % len(KINDS)]}"
        marks.append(tag("rect", words, class_=kind, x=percent(at), y=2, width=percent(share), height=22))
        at += share
    if limit is not None:
        x = percent(min(100.0, 100 * limit / whole))
        marks.append(tag("line", class_="whisker", x1=x, x2=x, y1=0, y2=26))
    return picture(alt, *marks, class_="row", height=26)
