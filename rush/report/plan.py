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

KINDS = {
    "parameters": "matmul", "gradients": "attention", "master": "embedding", "reference": "offload", "activations": "norm_elementwise",
    "logits": "loss", "casts": "bubble", "working": "data", "buffers": "communication", "pipeline": "bubble", "streams": "offload", "gathered": "gathered",
    "unfilled": "idle", "context": "other",
    "matmul": "matmul", "attention": "attention", "elementwise": "norm_elementwise", "loss": "loss", "embedding": "embedding",
    "communication": "communication", "bubble": "bubble", "offload": "offload", "optimizer": "optimizer", "launching": "idle",
    "data": "data", "other": "other",
}  # fmt: skip
"""The style class, and so the color, of each part: the same in every plan."""
Part = tuple[str, str, str]
"""Name, class and size of a part, for the legend."""


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
        verdict=verdict,
        fullest=fullest,
    )


def verdict(plan: Mapping[str, Any]) -> str:
    """Whether it fits: `tight` where the expected error is larger than the room that is left."""
    if not plan["fits"]:
        return "does not fit"
    error = f"{100 * plan['expected_error']['memory']:.0f} %"
    return f"tight: it fits by less than the expected error of {error}" if plan.get("tight") else "fits"


def fullest(plan: Mapping[str, Any]) -> float:
    """The peak memory of a run: of a save or a validation, if that takes more than a step."""
    return float(max([plan["memory_bytes"]["total"], *(plan.get("phases_bytes") or {}).values()]))


def _memory(plan: Mapping[str, Any]) -> tuple[Markup, list[Part]]:
    parts = {k: float(v) for k, v in plan["memory_bytes"].items() if k not in ("total", "tensors")}
    limit = float(plan["machine"]["memory_bytes"])
    return _stacked(parts, max(limit, sum(parts.values())), limit, formatting.size), [
        (part, kind_of(part), formatting.size(value)) for part, value in parts.items()
    ]


def _time(plan: Mapping[str, Any]) -> tuple[Markup, list[Part]]:
    parts = {k: float(v) for k, v in plan["time_s"].items() if k != "step"}

    def say(seconds: float) -> str:
        return f"{1e3 * seconds:,.1f} ms"

    return _stacked(parts, sum(parts.values()), None, say), [
        (part, kind_of(part), say(value)) for part, value in parts.items()
    ]


def kind_of(part: str) -> str:
    return KINDS.get(part, "other")


def _stacked(parts: Mapping[str, float], whole: float, limit: float | None, say: Any) -> Markup:
    """Parts side by side, in percent of the column, and a line at the limit."""
    at, marks = 0.0, []
    alt = ", ".join(f"{part} {say(value)}" for part, value in parts.items())
    for part, value in parts.items():
        share = 100 * value / whole
        words, kind = tooltip(f"{part}: {say(value)}"), f"part {kind_of(part)}"
        marks.append(tag("rect", words, class_=kind, x=percent(at), y=2, width=percent(share), height=22))
        at += share
    if limit is not None:
        x = percent(min(100.0, 100 * limit / whole))
        marks.append(tag("line", class_="whisker", x1=x, x2=x, y1=0, y2=26))
    return picture(alt, *marks, class_="row", height=26)
