"""Plans and published runs as lines and rows of a picture: the elements of the planner's charts.

One rule for all: plans are hollow, dashed or pale and have the expected error as a whisker; published measurements are filled
and have the color of the plan of that run. A cross marks a plan that does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from rush.records.plan_chart import PlanChartRecord, PredictedPoint, PublishedPoint
from rush.report.panels import Curve, Curves, Dot, Level, Panel, StackPart, StackRow, Stacks
from rush.report.plan_words import IDEAL, MEASURED, PLANNED, error_words

Value = Callable[[PredictedPoint], float]
MEMORY = {
    "weights": ("parameters", "reference"),
    "gradients": ("gradients",),
    "moments": ("optimizer", "master"),
    "activations and logits": ("activations", "logits", "casts", "working", "pipeline"),
    "gathered, buffers": ("gathered", "buffers", "streams"),
    "gaps, driver, rest": (),
}
TIME = {
    "matmuls": ("matmul",),
    "attention": ("attention",),
    "elementwise, loss": ("elementwise", "loss", "embedding", "adapters"),
    "update": ("optimizer",),
    "communication": ("communication", "bubble", "offload"),
    "launching, rest": (),
}
"""The groups of parts that have a color; the last takes what no other has."""


def per_device(point: PredictedPoint) -> float:
    return point["tokens_per_s"] / point["devices"]


def needed(point: PredictedPoint) -> float:
    return point["needed_bytes"]


def in_group(record: PlanChartRecord, group: str) -> list[PredictedPoint]:
    return [point for point in record["predicted"] if point["group"] == group]


def plan_lines(
    points: Sequence[PredictedPoint], value: Value, kind: str, colors: Mapping[str, int] | None = None
) -> list[Curve]:
    """A line per series with the stated error, and crosses over what does not fit."""
    series = list(dict.fromkeys(point["series"] for point in points))
    colors = colors or {name: place % 6 + 1 for place, name in enumerate(series)}
    found = []
    for name in series:
        own = sorted((point for point in points if point["series"] == name), key=lambda one: one["x"])
        dots = [dot_of(point, value(point), kind) for point in own]
        found.append(Curve(f"{name} ({PLANNED})", dots, colors[name], "extrapolated"))
    if crossed := [
        Dot(p["x"], value(p), note=f"{p['series']}: does not fit") for p in points if not p["fits"]
    ]:
        found.append(Curve("does not fit", crossed, 2, "crosses"))
    return found


def dot_of(point: PredictedPoint, value: float, kind: str) -> Dot:
    share = point["expected_error"]["time" if kind == "time" else "memory"]
    return Dot(
        point["x"], value, max(value * (1 - share), value * 0.01), value * (1 + share), note=point["name"]
    )


def measured_lines(
    runs: Sequence[PublishedPoint],
    value: Callable[[PublishedPoint], float],
    colors: Mapping[str, int] | None = None,
    planned: Value | None = None,
) -> list[Curve]:
    """Filled marks for what was published; with `planned` hollow ones for the plans of the same runs."""
    found = []
    for place, name in enumerate(dict.fromkeys(run["series"] for run in runs)):
        own = [run for run in runs if run["series"] == name]
        color = (colors or {}).get(name, place % 6 + 1)
        head = "" if name == "published" else f"{name}, "
        if planned is not None:
            again = [dot_of(run["planned"], planned(run["planned"]), "time") for run in own]
            found.append(Curve(f"{head}the same runs, {PLANNED}", again, color, "hollow"))
        dots = [Dot(run["x"], value(run), note=run["name"]) for run in own]
        found.append(Curve(f"{head}{MEASURED}", dots, color, "dots"))
    return found


def measured_each(run: PublishedPoint) -> float:
    return run["tokens_per_s"] / run["devices"]


def grouped(parts: Mapping[str, float], groups: Mapping[str, Sequence[str]]) -> list[StackPart]:
    """Parts in groups with a color each; the last group takes the rest."""
    sums = dict.fromkeys(groups, 0.0)
    rest = list(groups)[-1]
    for part, value in parts.items():
        sums[next((name for name, own in groups.items() if part in own), rest)] += value
    return [StackPart(name, value, place) for place, (name, value) in enumerate(sums.items(), 1) if value > 0]


def memory_row(point: PredictedPoint, name: str = "") -> StackRow:
    parts: dict[str, float] = {**point["memory_bytes"]}
    parts["between steps"] = max(0.0, point["needed_bytes"] - sum(parts.values()))
    share, total = point["expected_error"]["memory"], point["needed_bytes"]
    note = "does not fit" if not point["fits"] else "fits by less than the error" if point["tight"] else ""
    return StackRow(
        name or point["name"], grouped(parts, MEMORY), total * (1 - share), total * (1 + share), note=note
    )


def time_row(point: PredictedPoint, name: str = "") -> StackRow:
    total, share = sum(point["time_s"].values()), point["expected_error"]["time"]
    notes = [f"{per_device(point):,.0f} tokens/s each"]
    notes += ["does not fit"] if not point["fits"] else []
    return StackRow(
        name or point["name"],
        grouped(point["time_s"], TIME),
        total * (1 - share),
        total * (1 + share),
        note=", ".join(notes),
    )


def memory_panel(title: str, points: Sequence[PredictedPoint], names: Iterable[str] | None = None) -> Stacks:
    room = points[0]["room_bytes"]
    rows = [memory_row(p, n) for p, n in zip(points, names or [p["name"] for p in points], strict=True)]
    return Stacks(
        title, "B", rows, Level(room, "memory of a device"), f"{PLANNED}, {error_words(points, 'memory')}"
    )


def time_panel(title: str, points: Sequence[PredictedPoint], names: Iterable[str] | None = None) -> Stacks:
    rows = [time_row(p, n) for p, n in zip(points, names or [p["name"] for p in points], strict=True)]
    return Stacks(title, "s", rows, interval=f"{PLANNED}, {error_words(points, 'time')}")


def published_memory(title: str, runs: Sequence[PublishedPoint]) -> list[Panel]:
    """Plans of published runs by part, with what their allocators had reserved."""
    rows = []
    for run in runs:
        if (found := run.get("memory_bytes")) is None:
            continue
        parts = {k: float(v) for k, v in run["planned"]["memory_bytes"].items() if k != "context"}
        total, share = run["planned_reserved_bytes"], run["planned"]["expected_error"]["memory"]
        low, high = total * (1 - share), total * (1 + share)
        rows.append(StackRow(run["name"], grouped(parts, MEMORY), low, high, found))
    plans = [run["planned"] for run in runs]
    whiskers = f"{PLANNED}, {error_words(plans, 'memory')}"
    return [Stacks(title, "B", rows, interval=whiskers, measured=MEASURED)] if rows else []


def over_one(points: Sequence[PredictedPoint]) -> Curves:
    """Speed over that of the smallest number of devices, and the ideal line."""
    first = {p["series"]: p for p in sorted(points, key=lambda one: -one["x"])}

    def value(point: PredictedPoint) -> float:
        base = first[point["series"]]
        return base["x"] * point["tokens_per_s"] / base["tokens_per_s"]

    xs = sorted({point["x"] for point in points})
    ideal = Curve(IDEAL, [Dot(x, x) for x in xs], 6, "formula")
    lines = [ideal, *plan_lines([p for p in points if p["x"] > 1], value, "time")]
    title = "Speed-up over one device, the step unchanged"
    return Curves(title, "devices", "times one device", "", "×", lines, y_log=False)


def quotients(
    points: Sequence[PredictedPoint], value: Value, colors: Mapping[str, int] | None = None
) -> list[Curve]:
    """Lines of quotients of plans, whose common error cancels: no whiskers."""
    return [
        Curve(line.name, [Dot(dot.x, dot.y, note=dot.note) for dot in line.dots], line.color, line.style)
        for line in plan_lines(points, value, "time", colors)
    ]
