"""The roofline: what bounds a rung, arithmetic or memory.

A chip has a maximum FLOP rate (the flat roofs, one per dtype, measured here with large matmuls) and a maximum bandwidth (the
slope, measured with a large copy). Work with low arithmetic intensity is under the slope and needs less traffic; work under a
flat roof needs a faster dtype.

A timer cannot measure the bytes that a step moves. If the record has the figure it is used; otherwise the chart assumes the
minimum: to write and read the peak memory once per micro batch. Real traffic is higher, so the true position of a rung is
further left than drawn. The height of a rung is measured, not estimated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from rush.report import formatting
from rush.report.axes import NARROW, WIDE, Frame, free_spot, x_axis, y_axis
from rush.report.ladder import LadderView, RungView
from rush.report.svg import Scale, decades, path, picture, tag, text_at, tooltip

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""
REACHES = (13.0, 20.0, 28.0)
DIRECTIONS = ((1, 0), (-1, 0), (0.7, -0.8), (-0.7, -0.8), (0.7, 0.8), (-0.7, 0.8), (0, -1), (0, 1))


@dataclass(frozen=True)
class Position:
    """The position of a rung: operations per byte, and operations per second."""

    rung: RungView
    intensity: float
    flops: float
    estimated: bool


def positions(ladder: LadderView) -> list[Position]:
    found = []
    for rung in ladder.rungs:
        traffic, estimated = _traffic(rung)
        if rung.speed and rung.flops_per_token and rung.step_tokens and traffic:
            intensity = rung.flops_per_token * rung.step_tokens / traffic
            flops = rung.flops_per_token * rung.speed.median
            if 1e-100 < intensity < 1e100 and 1e-100 < flops < 1e100:
                found.append(Position(rung, intensity, flops, estimated))
    return found


def _traffic(rung: RungView) -> tuple[float | None, bool]:
    """Bytes of one step, and whether that is the estimate."""
    if rung.bytes_per_step:
        return rung.bytes_per_step, False
    if not rung.peak_memory_bytes or not rung.step_tokens or not rung.micro or not rung.sequence:
        return None, True
    micro_batches = max(1.0, rung.step_tokens / (rung.micro * rung.sequence))
    return 2 * rung.peak_memory_bytes * micro_batches, True


def rooflines(ladder: LadderView) -> tuple[Markup, Markup] | None:
    """The roofline for a wide and a narrow column; None without a measured roof or a rung to place."""
    places = positions(ladder)
    if not places or not (ladder.matmul or ladder.copy_bytes_per_s):
        return None
    return _roofline(WIDE, ladder, places), _roofline(NARROW, ladder, places)


def _roofline(frame: Frame, ladder: LadderView, places: Sequence[Position]) -> Markup:
    frame = Frame(frame.width, frame.height + 40, frame.left, frame.right, 26, frame.bottom)
    roofs = sorted(ladder.matmul.items(), key=lambda item: item[1])
    x, y = _scales(frame, ladder, places)
    marks = y_axis(frame, y, decades(y.low, y.high), formatting.tick, "achieved FLOP/s")
    marks += x_axis(frame, x, decades(x.low, x.high), formatting.tick, "FLOP per byte")
    top_rate = roofs[-1][1] if roofs else None
    marks += _slope(x, y, ladder.copy_bytes_per_s, top_rate)
    dots = [(x(place.intensity), y(place.flops)) for place in places]
    marks += _roofs(frame, x, y, roofs, ladder.copy_bytes_per_s, dots)
    marks += _dots(frame, x, y, places)
    best = max(places, key=lambda place: place.flops)
    alt = (
        f"Roofline with {formatting.plural(len(places), 'rung')}. Highest: {best.rung.title} at "
        f"{formatting.si(best.flops, 'FLOP/s')}, {formatting.digits(best.intensity)} FLOP per byte."
    )
    return picture(alt, *marks, class_="curve-picture", viewBox=frame.view_box)


def _scales(frame: Frame, ladder: LadderView, places: Sequence[Position]) -> tuple[Scale, Scale]:
    rates = [place.flops for place in places] + list(ladder.matmul.values())
    intensities = [place.intensity for place in places]
    if ladder.copy_bytes_per_s:
        # The corner where the slope meets the lowest roof belongs into the picture.
        intensities += [rate / ladder.copy_bytes_per_s for rate in ladder.matmul.values()]
    x = Scale(min(intensities) / 2.5, max(intensities) * 2.5, frame.left, frame.x_end, log=True)
    return x, Scale(min(rates) / 2, max(rates) * 2, frame.y_end, frame.top, log=True)


def _slope(x: Scale, y: Scale, bandwidth: float | None, top_rate: float | None) -> list[Markup]:
    """The part of the memory roof that lies inside the picture, up to the highest flat roof."""
    if bandwidth is None:
        return []
    start = max(x.low, y.low / bandwidth)
    end = min(x.high, (top_rate or y.high) / bandwidth)
    if start >= end:
        return []
    line = [(x(start), y(start * bandwidth)), (x(end), y(end * bandwidth))]
    middle = math.sqrt(start * end)
    marks = [
        tag("path", tooltip(f"memory copy: {formatting.si(bandwidth, 'B/s')}"), class_="roof", d=path(line))
    ]
    angle = math.degrees(math.atan2(line[1][1] - line[0][1], line[1][0] - line[0][0]))
    place = f"translate({x(middle):.1f} {y(middle * bandwidth) - 7:.1f}) rotate({angle:.1f})"
    if math.dist(*line) > 130:
        label = f"copy {formatting.si(bandwidth, 'B/s')}"
        marks.append(tag("text", label, class_="note", transform=place, text_anchor="middle"))
    return marks


def _roofs(
    frame: Frame,
    x: Scale,
    y: Scale,
    roofs: Sequence[tuple[str, float]],
    bandwidth: float | None,
    dots: Sequence[tuple[float, float]],
) -> list[Markup]:
    """The flat roofs, each beginning where the slope reaches it, with labels that avoid dots and each other."""
    lines, labels = [], []
    boxes: list[Box] = [(cx - 6, cy - 6, cx + 6, cy + 6) for cx, cy in dots]
    for group in _grouped(roofs):
        for dtype, rate in group:
            corner = x(rate / bandwidth) if bandwidth else frame.left
            start = min(max(corner, frame.left), frame.x_end - 30)
            description = tooltip(f"measured ceiling, {dtype}: {formatting.si(rate, 'FLOP/s')}")
            lines.append(
                tag("path", description, class_="roof", d=path([(start, y(rate)), (frame.x_end, y(rate))]))
            )
        label = ", ".join(f"{dtype} {formatting.si(rate)}" for dtype, rate in group)
        box = _label_box(frame, start, y(group[0][1]), y(group[-1][1]), len(label) * 6.4, boxes)
        boxes.append(box)
        labels.append(tag("text", label, class_="note", x=box[2], y=box[3] - 3, text_anchor="end"))
    return lines + labels


def _grouped(roofs: Sequence[tuple[str, float]]) -> list[list[tuple[str, float]]]:
    """Roofs from the highest down; those within a tenth of each other share one label."""
    groups: list[list[tuple[str, float]]] = []
    for roof in sorted(roofs, key=lambda item: -item[1]):
        if groups and roof[1] > groups[-1][0][1] * 0.9:
            groups[-1].append(roof)
        else:
            groups.append([roof])
    return groups


def _label_box(
    frame: Frame, start: float, high: float, low: float, width: float, taken: Sequence[Box]
) -> Box:
    """The first free place: above or under the line, at its right end, in the middle or at its beginning."""
    right, left = frame.x_end - width, min(start + 8, frame.x_end - width)
    places = [
        (at, top, at + width, top + 15)
        for at in (right, (left + right) / 2, left)
        for top in (high - 19, low + 4)
    ]
    return next((box for box in places if not any(_overlap(box, other) for other in taken)), places[0])


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _dots(frame: Frame, x: Scale, y: Scale, places: Sequence[Position]) -> list[Markup]:
    """A dot per rung and its number beside it, on the first side that is still free."""
    marks, taken = [], [(x(place.intensity), y(place.flops)) for place in places]
    for place in places:
        cx, cy = x(place.intensity), y(place.flops)
        description = f"{place.rung.index}. {place.rung.title}: {formatting.si(place.flops, 'FLOP/s')}, {formatting.digits(place.intensity)} FLOP per byte"
        marks.append(tag("circle", tooltip(description), class_="dot place", cx=cx, cy=cy, r=4.5))
    for place in places:
        cx, cy = x(place.intensity), y(place.flops)
        spot = free_spot(frame, cx, cy, taken, REACHES, DIRECTIONS, 11)
        if spot is not None:
            taken.append(spot)
            number = str(place.rung.index)
            marks.append(text_at(spot[0], spot[1] + 4, number, class_="note strong", anchor="middle"))
    return marks
