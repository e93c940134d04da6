"""Bars: the ladder itself, the time breakdown, claims against findings.

Every bar begins at zero, so that lengths compare as the numbers do. A row's picture is drawn in percent
of its column, which leaves room at the right for the number; the page stacks the columns on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rush.report import formatting
from rush.report.ladder import MeasureView, RungView
from rush.report.svg import Scale, percent, picture, tag, text_at, tooltip, whisker

SPEED_FULL = 64.0
MEMORY_FULL = 56.0
"""End of the longest bar, in percent of the column: the rest is for its number."""

CLASSES = {
    "attention": "attention",
    "matmul": "matmuls",
    "norm_elementwise": "norms and elementwise",
    "loss": "loss",
    "optimizer": "optimizer",
    "data": "waiting for data",
    "other": "other",
    "idle": "idle",
}
"""The classes of the time breakdown in the order they are stacked, with their names for a person."""


@dataclass(frozen=True)
class Segment:
    """A piece of a stacked bar."""

    kind: str
    ms: float
    share: float


def top_speed(measures: Sequence[MeasureView | None]) -> float | None:
    """The largest value that has to fit: the upper end of the longest whisker."""
    return max((max(m.median, m.high or 0.0) for m in measures if m is not None), default=None)


def top_memory(rungs: Iterable[RungView]) -> float | None:
    """The largest peak memory of these rungs; None where none is known."""
    return max((rung.peak_memory_bytes or 0.0 for rung in rungs), default=0.0) or None


def speed_bar(
    measure: MeasureView | None,
    top: float | None,
    who: str,
    *,
    kind: str = "speed",
    total: float | None = None,
) -> Markup | None:
    """One bar with its whisker, its number and the cumulative gain; None when nothing was measured."""
    if measure is None or top is None:
        return None
    scale = Scale(0, top, 0, SPEED_FULL)
    label = formatting.speed(measure.median)
    alt = f"{who}: {label}"
    marks = [
        tag("rect", class_=f"bar {kind}", x="0", y=4, width=percent(scale(measure.median)), height=18, rx=2)
    ]
    end = scale(measure.median)
    if measure.low is not None and measure.high is not None:
        alt += f", 95 % interval {formatting.interval(measure.low, measure.high)}"
        low, high = scale(max(0.0, measure.low)), scale(measure.high)
        marks += whisker(percent(low), percent(high), 13, 5)
        end = max(end, high)
    if measure.n is not None:
        alt += f", {formatting.plural(measure.n, 'sample')}"
    beside = [tag("tspan", formatting.ratio(total), class_="soft", dx=7)] if total is not None else []
    if total is not None:
        alt += f", {formatting.ratio(total)} cumulative"
    marks.append(tag("text", label, *beside, class_="value", x=percent(end), dx=8, y=18))
    return picture(alt, tooltip(alt), *marks, class_="row", height=26)


def memory_bar(size_bytes: float | None, top: float | None, who: str) -> Markup | None:
    if size_bytes is None or top is None:
        return None
    width = Scale(0, top, 0, MEMORY_FULL)(size_bytes)
    label = formatting.size(size_bytes)
    alt = f"{who}: peak memory {label}"
    bar = tag("rect", class_="bar memory", x="0", y=7, width=percent(width), height=12, rx=2)
    value = tag("text", label, class_="value", x=percent(width), dx=8, y=18)
    return picture(alt, tooltip(alt), bar, value, class_="row", height=26)


def segments(breakdown: Mapping[str, float]) -> list[Segment]:
    """The classes of one step in stacking order; what has no class of ours counts as other."""
    sums = dict.fromkeys(CLASSES, 0.0)
    for kind, ms in breakdown.items():
        sums[kind if kind in CLASSES else "other"] += ms
    total = sum(sums.values())
    return [Segment(kind, ms, ms / total) for kind, ms in sums.items() if ms > 0]


def ms_per_thousand(rung: RungView) -> float | None:
    """Profiled milliseconds for a thousand tokens: comparable between rungs of different batch."""
    if not rung.breakdown or not rung.step_tokens or rung.step_tokens < 0:
        return None
    return sum(rung.breakdown.values()) / rung.step_tokens * 1000


def breakdown_bar(rung: RungView, full: float) -> Markup | None:
    """A step's time stacked by class, `full` percent wide."""
    parts = segments(rung.breakdown)
    if not parts:
        return None
    marks, x = [], 0.0
    for part in parts:
        name, width = CLASSES[part.kind], part.share * full
        inside = [
            tag("rect", tooltip(f"{name}: {formatting.milliseconds(part.ms)}, {formatting.share(part.share)}"),
                class_=f"part {part.kind}", x=percent(x), y=2, width=percent(width), height=22)
        ]  # fmt: skip
        if width >= 13:
            label = f"{part.share * 100:.0f} %"
            middle = percent(x + width / 2)
            inside.append(text_at(middle, 17.5, label, class_=f"on {part.kind}", anchor="middle"))
        marks += inside
        x += width
    description = ", ".join(f"{CLASSES[part.kind]} {formatting.share(part.share)}" for part in parts)
    total = formatting.milliseconds(sum(rung.breakdown.values()))
    return picture(f"{rung.title}: {total} a step. {description}", *marks, class_="row", height=26)


def claim_scale(ratios: Sequence[float]) -> Scale:
    """A common axis for claims and findings, by the logarithm: ×2 and ×0.5 are equally far from ×1."""
    low, high = min([*ratios, 0.8]), max([*ratios, 1.25])
    return Scale(low / 1.08, high * 1.08, 2, 98, log=True)


def claim_axis(scale: Scale) -> Markup:
    """The axis over the claims: round ratios, each twice the one before."""
    steps = [2.0**k for k in range(math.ceil(math.log2(scale.low)), math.floor(math.log2(scale.high)) + 1)]
    thinned = steps[:: max(1, math.ceil(len(steps) / 6))] if len(steps) > 6 else steps
    marks = [
        text_at(percent(scale(value)), 16, formatting.tick_ratio(value), class_="tick", anchor="middle")
        for value in sorted({*thinned, 1.0})
    ]
    return tag("svg", *marks, class_="row", height=22, aria_hidden="true")


def claim_row(
    claimed: float | None, found: float | None, low: float | None, high: float | None, scale: Scale, who: str
) -> Markup:
    """A hollow diamond at the claim, a dot with an interval at the finding."""
    marks = [tag("line", class_="zero", x1=percent(scale(1)), x2=percent(scale(1)), y1=0, y2=26)]
    alt = f"{who}: claimed {formatting.change(claimed)}, found {formatting.change(found)}"
    if low is not None and high is not None and low > 0:
        marks += whisker(percent(scale(low)), percent(scale(high)), 13, 4)
    if found is not None:
        marks.append(tag("circle", class_="found", cx=percent(scale(found)), cy=13, r=5))
    if claimed is not None and claimed > 0:
        # A nested svg moves by percent, which a path cannot.
        diamond = tag("path", class_="claimed", d="M0 -7L7 0L0 7L-7 0Z")
        marks.append(tag("svg", diamond, x=percent(scale(claimed)), y=13, class_="over"))
    return picture(alt, tooltip(alt), *marks, class_="row", height=26)
