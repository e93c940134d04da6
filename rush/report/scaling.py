"""A scaling study as a page: curves against the ideal line, all layouts side by side, and the cost of communication.

The ideal line assumes that no device ever waits: for strong and for weak scaling, tokens per second in proportion to the number
of devices. Points that are not findings (no parity, shared devices) are in the tables with their reason, but in no curve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from markupsafe import Markup

from rush.files import write_atomic
from rush.records.scaling import SCALE, LinkRecord, PointRecord, ScaleRecord, read_scale
from rush.report import bars, curves, formatting, headlines
from rush.report.axes import x_axis, y_axis
from rush.report.charts import PANEL, Chart, ChartLine, ChartPoint, draw_panel, scales
from rush.report.compare import letter_of, series_of
from rush.report.ladder import MeasureView, ParityView, measure, parity
from rush.report.lenient import text
from rush.report.page import flattened, render
from rush.report.scaling_words import headline, pair_words, speed_of, took, warnings
from rush.report.svg import path, tag, ticks, tooltip

TONES = {
    "baseline": ("plain", "dot"),
    "equal": ("good", "up"),
    "different": ("bad", "unequal"),
    "not judged": ("caution", "ring"),
    "no effect": ("caution", "level"),
    "shared device": ("plain", "level"),
    "unsupported": ("plain", "barred"),
    "out of memory": ("bad", "cross"),
    "crashed": ("bad", "cross"),
    "timed out": ("bad", "clock"),
    "diverged": ("bad", "cross"),
}
"""The color and the sign of each verdict."""
MEANINGS = {
    "baseline": "One device: what the others are compared with.",
    "equal": "The ranks learn what one rank learns, and the profile shows the layout at work: a finding.",
    "different": "The ranks do not learn what one rank learns, so their speed is no finding.",
    "not judged": "Nothing says that the ranks learn the same, so their speed is no finding.",
    "no effect": "The profile does not show what the layout should do.",
    "shared device": "More ranks than devices: they learn the same, and their speed means nothing.",
    "unsupported": "The layout cannot run here, for the reason beside it.",
}


@dataclass(frozen=True)
class LayoutRow:
    """A point as a line of the page."""

    point: PointRecord
    title: str
    bar: Markup | None
    memory: Markup | None
    efficiency: tuple[str, ...]
    parity: ParityView | None
    overlay: Markup | None


def write_scale_report(folder: Path, html: Path) -> None:
    """Draw the study recorded in `folder` into one self-contained file."""
    with SCALE.using(folder):
        write_atomic(html, scale_page(read_scale(folder)))


def scale_page(record: ScaleRecord) -> str:
    rows = rows_of(record)
    return render(
        "scaling.html",
        title=f"{text(record['name'])} · scale",
        record=record,
        headline=headline(record),
        warnings=warnings(record),
        machine=headlines.machine_name(record["machine"]),
        machine_rows=flattened(record["machine"]),
        figures=[figure for kind in ("strong", "weak") for figure in figures_of(record, kind)],
        groups=[
            (count, [row for row in rows if row.point["devices"] == count])
            for count in sorted({row.point["devices"] for row in rows})
        ],
        rows=rows,
        overlays=[row for row in rows if row.overlay and row.point["devices"] > 1],
        links=link_figures(record["links"]),
        no_links=[link for link in record["links"] if link.get("reason")],
        tones=TONES,
        meanings={
            name: description
            for name, description in MEANINGS.items()
            if any(p["verdict"] == name for p in record["points"])
        },
        memory_words=memory_words,
        pair_words=pair_words,
        took=took(record),
    )


def rows_of(record: ScaleRecord) -> list[LayoutRow]:
    speeds = [measure(point["tokens_per_s"]) for point in record["points"]]
    top = bars.top_speed(speeds)
    memory = (
        max((float(max(p["memory_bytes"])) for p in record["points"] if p["memory_bytes"]), default=0.0)
        or None
    )
    return [_row(point, speed, top, memory) for point, speed in zip(record["points"], speeds, strict=True)]


def _row(point: PointRecord, speed: MeasureView | None, top: float | None, memory: float | None) -> LayoutRow:
    title = _name(point)
    held = float(max(point["memory_bytes"])) if point["memory_bytes"] else None
    same = parity(point["parity"] or {})
    return LayoutRow(
        point,
        title,
        bars.speed_bar(speed, top, title),
        bars.memory_bar(held, memory, title),
        tuple(
            f"{kind}: {formatting.share(found['ratio'])} ({formatting.share(found['ci95'][0])} to {formatting.share(found['ci95'][1])})"
            for kind, found in point["efficiency"].items()
        ),
        same,
        curves.loss_overlay(same, title) if same else None,
    )


def memory_words(point: PointRecord) -> str:
    """The peak of the ranks: one figure where they are alike."""
    ranks = point["memory_bytes"]
    if not ranks:
        return formatting.MISSING
    low, high = float(min(ranks)), float(max(ranks))
    return (
        formatting.size(high) if high < 1.02 * low else f"{formatting.size(low)} to {formatting.size(high)}"
    )


def figures_of(record: ScaleRecord, scaling: str) -> list[Chart]:
    """Speed and efficiency over devices, of one kind of scaling; none where nothing was found. (A rank that was a group of its
    own stands in the table.)"""
    equal = [p for p in record["points"] if p["verdict"] == "equal" and p["devices"] > 1]
    found = [p for p in equal if scaling in p["efficiency"]]
    if not found:
        return []
    ones = [
        p
        for p in record["points"]
        if p["verdict"] == "baseline" and scaling in p["scalings"] and p["tokens_per_s"]
    ]
    names = list(dict.fromkeys(_name(point) for point in found))
    speed = [_line(place, name, ones, found, _speed_dot) for place, name in enumerate(names)]
    share = [
        _line(place, name, [], found, lambda p: _share_dot(p, scaling)) for place, name in enumerate(names)
    ]
    first = ones[0] if ones else min(found, key=lambda point: point["devices"])
    predicted = [p for p in found if p.get("predicted_tokens_per_s")]
    title, each = f"{scaling} scaling", speed_of(first) / first["devices"]
    speeds = _picture(record["devices"], speed, title, each, predicted)
    shares = _picture(record["devices"], share, f"{title}, efficiency", None, [])
    return [
        Chart(f"{title}, tokens per second", speeds, tuple(speed)),
        Chart(f"{title}, efficiency", shares, tuple(share)),
    ]


def _name(point: PointRecord) -> str:
    return f"{text(point['layout'])}{'' if point['peer_to_peer'] else ', no peer-to-peer'}"


def _line(
    place: int,
    name: str,
    first: Sequence[PointRecord],
    points: Sequence[PointRecord],
    dot: Callable[[PointRecord], ChartPoint],
) -> ChartLine:
    own = [*first, *(point for point in points if _name(point) == name)]
    dots = tuple(sorted(map(dot, own), key=lambda one: one.x))
    return ChartLine(letter_of(place), series_of(place), name, False, dots)


def _speed_dot(point: PointRecord) -> ChartPoint:
    speed = point["tokens_per_s"]
    assert speed is not None
    low, high = speed["ci95"]
    description = f"{_name(point)}, {formatting.plural(point['devices'], 'device')}: {formatting.speed(speed['median'])}"
    return ChartPoint(float(point["devices"]), speed["median"], low, high, description)


def _share_dot(point: PointRecord, scaling: str) -> ChartPoint:
    found = point["efficiency"][scaling]
    low, high = found["ci95"]
    description = (
        f"{_name(point)}, {formatting.plural(point['devices'], 'device')}: {formatting.share(found['ratio'])}"
    )
    return ChartPoint(float(point["devices"]), found["ratio"], low, high, description)


def _picture(
    devices: Sequence[int],
    lines: Sequence[ChartLine],
    title: str,
    each: float | None,
    predicted: Sequence[PointRecord],
) -> Markup:
    """Curves over the number of devices; `each` is what one device of the ideal line does, None for shares of it."""
    dots = [dot for line in lines for dot in line.points]
    ideal = [(float(count), each * count if each is not None else 1.0) for count in devices]
    highest = min(max(d.high for d in dots), 1.5 * ideal[-1][1])
    top = 1.06 * max(*(dot.y for dot in dots), *(value for _, value in ideal), highest)
    x, y = scales(devices[0], devices[-1], 1.25, top)
    label, what = (
        (formatting.tick, "tokens per second")
        if each is not None
        else (formatting.tick_share, "of the ideal line")
    )
    axes = y_axis(PANEL, y, ticks(0, top, 5), label, what)
    axes += x_axis(PANEL, x, [float(count) for count in devices], lambda value: f"{value:g}", "devices")
    line = path([(x(count), y(value)) for count, value in ideal])
    axes.append(tag("path", tooltip("the ideal line: no device ever waits"), class_="roof ideal", d=line))
    diamonds = []
    for point in predicted:
        value = float(point["predicted_tokens_per_s"] or 0.0)
        if value <= y.high:
            at = f"translate({x(point['devices']):g} {y(value):g})"
            mark = tag("path", class_="claimed", d="M0 -7L7 0L0 7L-7 0Z")
            words = tooltip(f"{_name(point)}: predicted {formatting.speed(value)}")
            diamonds.append(tag("g", words, mark, transform=at))
    best = max(dots, key=lambda dot: (dot.x, dot.y))
    alt = f"{title} over {', '.join(map(str, devices))} devices. Best on the most: {best.description}."
    return draw_panel(alt, axes, [_within(one, y.high) for one in lines], x, y, diamonds)


def _within(line: ChartLine, top: float) -> ChartLine:
    """The line with whiskers that end where the picture does."""
    dots = (replace(dot, low=max(0.0, dot.low), high=min(dot.high, top)) for dot in line.points)
    return replace(line, points=tuple(dots))


def link_figures(links: Sequence[LinkRecord]) -> list[Chart]:
    """What each link carries over message sizes: a picture for each number of ranks, with and without peer-to-peer."""
    figures = []
    groups = dict.fromkeys(
        (link["ranks"], link["peer_to_peer"], link["backend"]) for link in links if link["sizes"]
    )
    for ranks, peers, backend in groups:
        own = [lk for lk in links if lk["sizes"] and (lk["ranks"], lk["peer_to_peer"]) == (ranks, peers)]
        lines = [
            ChartLine(letter_of(place), series_of(place), _operation(link), False, _link_dots(link))
            for place, link in enumerate(own)
        ]
        title = f"{ranks} ranks over {text(backend)}" + ("" if peers else ", no peer-to-peer")
        figures.append(Chart(title, _link_picture(lines, title), tuple(lines)))
    return figures


def _operation(link: LinkRecord) -> str:
    return link["operation"].replace("_", "-")


def _link_dots(link: LinkRecord) -> tuple[ChartPoint, ...]:
    dots = []
    for size in link["sizes"]:
        rate, each = size["bus_bytes_per_s"], sorted(size["seconds"])
        middle = each[len(each) // 2]
        description = f"{_operation(link)} of {formatting.size(size['bytes'])}: {formatting.si(rate, 'B/s')}"
        dots.append(
            ChartPoint(size["bytes"], rate, rate * middle / each[-1], rate * middle / each[0], description)
        )
    return tuple(sorted(dots, key=lambda dot: dot.x))


def _link_picture(lines: Sequence[ChartLine], title: str) -> Markup:
    dots = [dot for line in lines for dot in line.points]
    sizes = sorted({dot.x for dot in dots})
    top = max(dot.y for dot in dots) * 1.1
    x, y = scales(sizes[0], sizes[-1], 1.5, top)
    axes = y_axis(PANEL, y, ticks(0, top, 5), formatting.tick, "bytes per second and link")
    axes += x_axis(PANEL, x, sizes[:: max(1, len(sizes) // 4)], formatting.size, "message")
    best = max(dots, key=lambda dot: dot.y)
    alt = f"{title}. Best: {best.description}."
    return draw_panel(alt, axes, [_within(line, top) for line in lines], x, y)
