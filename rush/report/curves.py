"""Curves: tokens per second against batch size, overlaid losses, raw samples.

Two quantities never share one picture with two scales: memory stands in its own panel under speed, and
the difference of two losses under the losses, because a difference that matters can be far thinner than
a line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from rush.report import formatting
from rush.report.axes import NARROW, WIDE, Frame, x_axis, y_axis
from rush.report.ladder import BatchPointView, MeasureView, ParityView
from rush.report.svg import (
    Scale,
    binary_unit,
    number,
    path,
    picture,
    tag,
    ticks,
    tooltip,
    upright_whisker,
    widened,
)


def batch_curves(points: Sequence[BatchPointView], stops_at: int | None) -> tuple[Markup, Markup] | None:
    """The batch curve for a wide and for a narrow column; None when no batch size was measured."""
    if not any(point.speed for point in points):
        return None
    return _batch_curve(WIDE, points, stops_at), _batch_curve(NARROW, points, stops_at)


def _batch_curve(frame: Frame, points: Sequence[BatchPointView], stops_at: int | None) -> Markup:
    measured = [(point, point.speed) for point in points if point.speed]
    top = max(max(m.median, m.high or 0.0) for _, m in measured) * 1.06
    has_memory = any(point.peak_memory_bytes for point, _ in measured)
    # Speed above, memory in a flatter panel under it.
    upper = Frame(
        frame.width, frame.height, frame.left, frame.right, 26, frame.height * 0.42 if has_memory else 40
    )
    x = Scale(points[0].micro / 1.3, points[-1].micro * 1.3, frame.left, frame.x_end, log=True)
    y = Scale(0, top, upper.y_end, upper.top)
    marks = y_axis(upper, y, ticks(0, top, 4), formatting.tick, "tokens per second")
    if stops_at is not None and points[0].micro <= stops_at <= points[-1].micro:
        marks += _stop_mark(upper, x(stops_at), frame.y_end, stops_at)
    line = [(x(point.micro), y(m.median)) for point, m in measured]
    marks.append(tag("path", class_="curve speed", d=path(line)))
    for point, m in measured:
        marks.append(_batch_dot(x(point.micro), y, point, m))
    for point in points:
        if point.speed is None:
            marks += _cross(x(point.micro), upper.y_end - 9, point)
    if has_memory:
        marks += _memory_panel(frame, upper, x, [point for point, _ in measured])
    else:
        marks.append(
            tag("line", class_="axis", x1=frame.left, x2=frame.x_end, y1=upper.y_end, y2=upper.y_end)
        )
    marks += x_axis(
        frame, x, [point.micro for point in points], lambda v: str(int(v)), "rows in a micro batch"
    )
    best_point, best = max(measured, key=lambda pair: pair[1].median)
    alt = (
        f"Tokens per second against batch size, {len(points)} sizes from {points[0].micro} to "
        f"{points[-1].micro}. Fastest: {formatting.speed(best.median)} at {best_point.micro}."
    )
    return picture(alt, *marks, class_="curve-picture", viewBox=frame.view_box)


def _stop_mark(frame: Frame, x: float, bottom: float, stops_at: int) -> list[Markup]:
    left_side = x > (frame.left + frame.x_end) / 2
    return [
        tag("line", class_="stop", x1=x, x2=x, y1=frame.top - 8, y2=bottom),
        tag("text", f"stops paying at {stops_at}", class_="note", x=x + (-6 if left_side else 6), y=frame.top + 2,
            text_anchor="end" if left_side else "start"),
    ]  # fmt: skip


def _batch_dot(x: float, y: Scale, point: BatchPointView, m: MeasureView) -> Markup:
    marks = [
        tooltip(f"{point.micro} rows: {formatting.speed(m.median)} ({formatting.interval(m.low, m.high)})")
    ]
    if m.low is not None and m.high is not None:
        marks.append(upright_whisker(x, y(max(0.0, m.low)), y(m.high), 4))
    marks.append(tag("circle", class_="dot speed", cx=x, cy=y(m.median), r=4.5))
    return tag("g", *marks)


def _cross(x: float, y: float, point: BatchPointView) -> list[Markup]:
    word = point.status.replace("_", " ")
    shape = f"M{number(x - 5)} {number(y - 5)}l10 10m0 -10l-10 10"
    return [
        tag("g", tooltip(f"{point.micro} rows: {word}"), tag("path", class_="cross", d=shape)),
        tag("text", word, class_="note", x=x + 4, y=y - 11, text_anchor="end"),
    ]


def _memory_panel(frame: Frame, upper: Frame, x: Scale, points: Sequence[BatchPointView]) -> list[Markup]:
    lower = Frame(frame.width, frame.height, frame.left, frame.right, upper.y_end + 30, frame.bottom)
    sizes = [point.peak_memory_bytes or 0.0 for point in points]
    top = max(sizes) * 1.1
    y = Scale(0, top, lower.y_end, lower.top)
    unit = binary_unit(top)
    marks = y_axis(lower, y, [k * unit for k in ticks(0, top / unit, 3)], formatting.size, "peak memory")
    bar = min(26.0, (lower.x_end - lower.left) / len(points) * 0.5)
    for point, value in zip(points, sizes, strict=True):
        rect = tag("rect", tooltip(f"{point.micro} rows: {formatting.size(value)}"), class_="bar memory",
                   x=x(point.micro) - bar / 2, y=y(value), width=bar, height=lower.y_end - y(value))  # fmt: skip
        marks.append(rect)
    return marks


LOSS_FRAME = Frame(340, 256, left=46, right=10, top=20, bottom=116)


def loss_overlay(parity: ParityView, who: str) -> Markup | None:
    """The rung's loss over the reference's, and their difference under it; None when there is no pair."""
    pairs = list(zip(parity.reference_losses, parity.losses, strict=False))
    both = [(step, a, b) for step, (a, b) in enumerate(pairs) if a is not None and b is not None]
    if len(both) < 2:
        return None
    frame = LOSS_FRAME
    x = Scale(0, max(len(pairs) - 1, 1), frame.left, frame.x_end)
    low, high = widened([value for _, a, b in both for value in (a, b)])
    y = Scale(low, high, frame.y_end, frame.top)
    marks = y_axis(frame, y, ticks(low, high, 4), formatting.tick, "loss")
    marks.append(tag("path", class_="curve reference", d=_broken(x, y, parity.reference_losses, len(pairs))))
    marks.append(tag("path", class_="curve rung", d=_broken(x, y, parity.losses, len(pairs))))
    gaps = [(step, b - a) for step, a, b in both]
    marks += _difference(frame, x, gaps)
    worst = max(abs(gap) for _, gap in gaps)
    alt = (
        f"{who}: loss over {len(pairs)} steps on top of the reference. It ends at {formatting.digits(both[-1][2])}, "
        f"the reference at {formatting.digits(both[-1][1])}; the largest difference is {formatting.digits(worst)}."
    )
    return picture(alt, tooltip(alt), *marks, class_="curve-picture", viewBox=frame.view_box)


def _difference(frame: Frame, x: Scale, gaps: Sequence[tuple[int, float]]) -> list[Markup]:
    """A strip with the difference of the losses, scaled to its own largest value."""
    worst = max(abs(gap) for _, gap in gaps)
    strip = Frame(frame.width, frame.height, frame.left, frame.right, frame.y_end + 38, 32)
    reach = worst or 1.0
    y = Scale(-reach, reach, strip.y_end, strip.top)
    at = [-worst, 0.0, worst] if worst else [0.0]
    marks = y_axis(strip, y, at, _signed, "")
    marks.append(tag("text", "difference", class_="axis-title", x=2, y=strip.top - 14))
    line = [(x(step), y(gap)) for step, gap in gaps]
    marks.append(tag("path", class_="curve difference", d=path(line)))
    last = int(x.high)
    steps = sorted({0, last // 2, last})
    return marks + x_axis(strip, x, steps, lambda v: str(int(v) + 1), "step")


def _signed(value: float) -> str:
    return "0" if value == 0 else f"{'+' if value > 0 else '−'}{_short(abs(value))}"


def _short(value: float) -> str:
    """Two significant digits, short enough for a narrow axis."""
    if 0.01 <= value < 1000:
        return f"{value:.2g}"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _broken(x: Scale, y: Scale, values: Sequence[float | None], length: int) -> str:
    """A line that stops where a value is missing (a non-finite loss) and continues after it."""
    text, pen_down = "", False
    for step, value in enumerate(values[:length]):
        if value is not None:
            text += f"{'L' if pen_down else 'M'}{number(x(step))} {number(y(value))}"
        pen_down = value is not None
    return text


def gradient_gap(parity: ParityView) -> float | None:
    """The largest relative difference of the gradient norms, step by step."""
    pairs = zip(parity.reference_grad_norms, parity.grad_norms, strict=False)
    gaps = [abs(b - a) / abs(a) for a, b in pairs if a is not None and b is not None and abs(a) > 1e-30]
    return max(gaps, default=None)


def sample_strip(measure: MeasureView, who: str) -> Markup | None:
    """Every raw sample as a dot, a line per process, with the median and the interval behind them."""
    rows = [row for row in measure.processes if row] or ([measure.samples] if measure.samples else [])
    values = [value for row in rows for value in row]
    if not values:
        return None
    low, high = widened([*values, measure.low or values[0], measure.high or values[0]])
    height = 26 + 14 * len(rows)
    frame = Frame(340, height + 8, left=8, right=8, top=6, bottom=30)
    x = Scale(low, high, frame.left, frame.x_end)
    marks = []
    if measure.low is not None and measure.high is not None:
        marks.append(
            tag("rect", class_="band", x=x(measure.low), y=2, width=x(measure.high) - x(measure.low),
                height=frame.y_end - 2)
        )  # fmt: skip
    marks.append(
        tag("line", class_="median", x1=x(measure.median), x2=x(measure.median), y1=2, y2=frame.y_end)
    )
    for line, row in enumerate(rows):
        y = frame.top + 5 + 14 * line
        marks += [tag("circle", class_="sample", cx=x(value), cy=y, r=2.6) for value in row]
    marks += x_axis(frame, x, ticks(low, high, 4), formatting.tick, "")
    spread = max(values) / min(values) if min(values) > 0 else math.nan
    alt = f"{who}: {formatting.plural(len(values), 'raw sample')} from {formatting.plural(len(rows), 'fresh process', 'fresh processes')}"
    if math.isfinite(spread):
        alt += f", the largest {formatting.digits((spread - 1) * 100)} % above the smallest"
    return picture(alt, tooltip(alt), *marks, class_="curve-picture strip", viewBox=frame.view_box)
