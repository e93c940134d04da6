"""The pictures of each of the planner's charts, from its record (`plan_marks.py` has their elements)."""

from __future__ import annotations

from collections.abc import Callable

from rush.records.plan_chart import MODES, PlanChartRecord, PredictedPoint, PublishedPoint
from rush.report.panels import Curve, Curves, Dot, Level, Mark, Panel, StackPart, StackRow, Stacks
from rush.report.plan_marks import (
    in_group,
    measured_each,
    measured_lines,
    memory_panel,
    needed,
    over_one,
    per_device,
    plan_lines,
    published_memory,
    quotients,
    time_panel,
)
from rush.report.plan_words import IDEAL, MEASURED, PLANNED, error_words, stops_paying


def panels(record: PlanChartRecord) -> list[Panel]:
    """The pictures of a chart, in order."""
    return DRAWN[record["chart"]](record)


def _speedup(record: PlanChartRecord) -> list[Panel]:
    points = record["predicted"]
    color = {"published": 4}
    lines = [
        *plan_lines(points, per_device, "time"),
        *measured_lines(record["published"], measured_each, color, per_device),
    ]
    return [
        Curves("Tokens per second of a device", "devices", "tokens/s of a device", "", "", lines),
        over_one(points),
    ]


def _memory(record: PlanChartRecord) -> list[Panel]:
    title = "Memory of one device by part"
    runs = record["published"]
    return [
        memory_panel(title, record["predicted"]),
        *published_memory("The same of published runs: planned by part, and measured", runs),
    ]


def _zero(record: PlanChartRecord) -> list[Panel]:
    stages, over = in_group(record, "stages"), in_group(record, "over devices")
    names = [point["series"] for point in stages]
    devices = stages[0]["devices"]
    room = Level(over[0]["room_bytes"], "memory of a device")
    speed = plan_lines(over, per_device, "time")
    memory = plan_lines(over, needed, "memory")
    found: list[Panel] = [
        memory_panel(f"Memory of one of {devices} devices", stages, names),
        time_panel(f"A step on {devices} devices", stages, names),
        Curves(
            "Memory over devices",
            "devices",
            "memory of a device",
            "",
            "B",
            memory,
            y_log=False,
            levels=[room],
        ),
        Curves("Speed over devices", "devices", "tokens/s of a device", "", "", speed, y_log=False),
    ]
    lines = measured_lines(record["published"], measured_each, None, per_device)
    if lines:
        found.append(Curves("Published runs", "devices", "tokens/s of a device", "", "", lines))
    return found


def _links(record: PlanChartRecord) -> list[Panel]:
    wires = {"own": "its own link", "other": str(record["options"]["link"])}
    found: list[Panel] = []
    for name in record["options"]["recipes"]:
        points = sorted(in_group(record, name), key=lambda one: _place(record, one))
        names = [f"{point['name']}, {wires[point['series']]}" for point in points]
        found.append(time_panel(f"{name}: a step on {points[0]['devices']} devices", points, names))
    return found


def _place(record: PlanChartRecord, point: PredictedPoint) -> tuple[int, int]:
    """Layouts in the order planned, the two variants of each side by side."""
    own = in_group(record, point["group"])
    names = list(dict.fromkeys(one["name"] for one in own))
    series = list(dict.fromkeys(one["series"] for one in own))
    return names.index(point["name"]), series.index(point["series"])


def _cards(record: PlanChartRecord) -> list[Panel]:
    recipes = record["options"]["recipes"]
    found: list[Panel] = []
    most = int(record["options"]["devices"])
    for devices in [count for count in (4, 8) if count <= most] or [most]:
        rows = [row for name in recipes for row in _speedup_rows(record, name, devices)]
        asked = {4: 4.0, 8: 9.0}.get(devices, float(devices))
        if rows:
            error = error_words([p for p in record["predicted"] if p["devices"] > 1], "time")
            found.append(
                Stacks(
                    f"{devices} devices: times one device",
                    "×",
                    rows,
                    Level(asked, f"×{asked:g}"),
                    f"{PLANNED}, {error}",
                )
            )
    last = sorted(in_group(record, recipes[-1]), key=lambda one: _place(record, one))
    names = [f"{point['name']}, {point['series'].split('-')[0]}" for point in last]
    found.append(time_panel(f"{recipes[-1]}: a step on {last[0]['devices']} devices", last, names))
    if lines := measured_lines(record["published"], measured_each, {"published": 4}, per_device):
        found.append(Curves("Published runs on A100s", "devices", "tokens/s of a device", "", "", lines))
    return found


def _speedup_rows(record: PlanChartRecord, name: str, devices: int) -> list[StackRow]:
    """What so many devices make of one, for each kind of comparison and each card; of those that fit."""
    found = []
    for mode in MODES:
        points = in_group(record, f"{name}, {mode}")
        for color, card in enumerate(dict.fromkeys(p["series"] for p in points), 1):
            own = {p["x"]: p for p in points if p["series"] == card and p["fits"]}
            if 1 in own and devices in own:
                times = own[devices]["tokens_per_s"] / own[1]["tokens_per_s"]
                share = own[devices]["expected_error"]["time"]
                low, high = times * (1 - share), times * (1 + share)
                title = f"{name}, {mode}, {card.split('-')[0]}"
                found.append(StackRow(title, [StackPart(card, times, color)], low, high))
    return found


def _nodes(record: PlanChartRecord) -> list[Panel]:
    weak, strong = in_group(record, "weak"), in_group(record, "strong")
    colors = {name: place % 6 + 1 for place, name in enumerate(dict.fromkeys(p["series"] for p in weak))}
    first = {run["series"]: run for run in sorted(record["published"], key=lambda one: -one["x"])}
    start = {p["series"]: p for p in sorted(weak, key=lambda one: -one["x"])}

    def share(run: PublishedPoint) -> float:
        return measured_each(run) / measured_each(first[run["series"]])

    speeds = [
        *plan_lines(weak, per_device, "time", colors),
        *measured_lines(record["published"], measured_each, colors),
    ]
    shares = [
        *quotients(weak, lambda p: per_device(p) / per_device(start[p["series"]]), colors),
        *measured_lines(record["published"], share, colors),
    ]
    begin = {p["series"]: p for p in sorted(strong, key=lambda one: -one["x"])}
    kept = quotients(strong, lambda p: per_device(p) / per_device(begin[p["series"]]))
    totals = plan_lines(strong, lambda point: point["tokens_per_s"], "time")
    base = min(strong, key=lambda one: one["x"])
    ideal = [Dot(x, base["tokens_per_s"] * x) for x in sorted({p["x"] for p in strong})]
    each = "tokens/s of a device"
    return [
        Curves("Weak scaling: every device does what it did", "nodes", each, "", "", speeds),
        Curves("What is left of one node's speed, weak", "nodes", "of one node", "", "%", shares, y_log=False, y_from_zero=False),
        Curves("Strong scaling: one step divided", "nodes", "tokens/s", "", "", [Curve(IDEAL, ideal, 6, "formula"), *totals]),
        Curves("What is left of one node's speed, strong", "nodes", "of one node", "", "%", kept, y_log=False, y_from_zero=False),
    ]  # fmt: skip


def _layouts(record: PlanChartRecord) -> list[Panel]:
    own = in_group(record, "own")
    found: list[Panel] = []
    if own:
        devices = own[0]["devices"]
        found += [
            time_panel(f"A step of {own[0].get('step_tokens', 0):,} tokens on {devices:,} devices", own),
            memory_panel(f"Memory of one of {devices:,} devices", own),
        ]
    rows = [_published_row(run) for run in record["published"]]
    if rows:
        plans = [run["planned"] for run in record["published"]]
        whiskers = f"{PLANNED}, {error_words(plans, 'time')}"
        found.append(Stacks("Published layouts: tokens per second of a device", "", rows, interval=whiskers, measured=MEASURED))  # fmt: skip
    return [*found, *published_memory("Published layouts: memory", record["published"])]


def _published_row(run: PublishedPoint) -> StackRow:
    value, share = per_device(run["planned"]), run["planned"]["expected_error"]["time"]
    note = "rush cannot run it" if run["planned"]["problems"] else ""
    part = StackPart(PLANNED, value, 1)
    return StackRow(run["name"], [part], value * (1 - share), value * (1 + share), measured_each(run), note)


def _batch(record: PlanChartRecord) -> list[Panel]:
    found: list[Panel] = []
    for group in dict.fromkeys(point["group"] for point in record["predicted"]):
        points = in_group(record, group)
        room = points[0]["room_bytes"]
        near = [point for point in points if point["needed_bytes"] <= 1.5 * room]
        marks = [
            Mark(stop, f"{name}: more stops paying")
            for name in dict.fromkeys(point["series"] for point in points)
            if (stop := stops_paying([p for p in points if p["series"] == name]))
        ]
        speed, memory = plan_lines(near, per_device, "time"), plan_lines(near, needed, "memory")
        limit = Level(room, f"limit, {group}")
        found += [
            Curves(f"{group}: speed", "rows in a micro batch", "tokens/s", "", "", speed, y_log=False, marks=marks),
            Curves(f"{group}: peak memory", "rows in a micro batch", "peak memory", "", "B", memory, y_log=False, levels=[limit]),
        ]  # fmt: skip
    return found


DRAWN: dict[str, Callable[[PlanChartRecord], list[Panel]]] = {
    "speedup": _speedup,
    "memory": _memory,
    "zero": _zero,
    "links": _links,
    "cards": _cards,
    "nodes": _nodes,
    "layouts": _layouts,
    "batch": _batch,
}
