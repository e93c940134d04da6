"""The kernel bench as a page: targets first, then a picture per op over its sizes, then every number.

The charts show the fraction of the machine's measured ceiling that a contender reaches: of the copy rate for
memory-bound ops, of the matmul rate for compute-bound ones. So ops are comparable at a glance, and the
distance to the roof is the potential gain. If no ceiling is known they show the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from rush.files import write_atomic
from rush.records.kernels import KERNELS, KernelOp, KernelRecord, KernelRow, read_kernels
from rush.records.targets import target_word
from rush.report import formatting, headlines
from rush.report.axes import x_axis, y_axis
from rush.report.charts import PANEL, Chart, ChartLine, ChartPoint, draw_panel, scales
from rush.report.compare import letter_of, series_of
from rush.report.page import flattened, render
from rush.report.svg import path, tag, ticks, tooltip

PASS_WORDS = {"forward": "forward", "backward": "backward", "both": "forward and backward"}
TONES = {
    "reached": ("good", "up"),
    "close call": ("caution", "query"),
    "missed": ("bad", "down"),
    "not measured": ("plain", "ring"),
    "equal": ("good", "dot"),
    "different": ("bad", "unequal"),
    "not judged": ("caution", "ring"),
}
"""The color and the sign of each verdict."""


@dataclass(frozen=True)
class KernelSection:
    """An op's part of the page."""

    op: KernelOp
    figures: tuple[Chart, ...]
    away: tuple[str, ...]
    """Contenders that were not available, with the reason."""


def write_kernel_report(folder: Path, html: Path) -> None:
    """Draw the bench recorded in `folder` into one self-contained file."""
    with KERNELS.using(folder):
        write_atomic(html, kernel_page(read_kernels(folder)))


def kernel_page(record: KernelRecord) -> str:
    targets = [(op["op"], target) for op in record["ops"] for target in op["targets"]]
    wrong = sorted(
        {_who(op, row) for op in record["ops"] for row in op["rows"] if _verdict(row) == "different"}
    )
    return render(
        "kernels.html",
        title="Kernels",
        record=record,
        machine=headlines.machine_name(record["machine"]),
        machine_rows=flattened(record["machine"]) + flattened(record.get("ceilings") or {}, "ceilings"),
        ceilings=record.get("ceilings") or {},
        targets=targets,
        reached=reached_of([target_word(target) for _, target in targets]),
        target_word=target_word,
        wrong=wrong,
        parts=[part_of(op) for op in record["ops"]],
        tones=TONES,
        pass_words=PASS_WORDS,
        reached_words=reached_words,
        interpreted=record.get("interpreted", False),
    )


def reached_of(words: Sequence[str]) -> str:
    """How many targets were reached, and apart how many were a close call or not measured: `4 of 9 targets reached`."""
    others = (("close call", "close calls"), ("not measured", "not measured"))
    counts = [(words.count(one), one if words.count(one) == 1 else many) for one, many in others]
    apart = "".join(f", {number} {word}" for number, word in counts if number)
    return f"{words.count('reached')} of {formatting.plural(len(words), 'target')} reached{apart}"


def _who(op: KernelOp, row: KernelRow) -> str:
    return f"{row['contender']} ({op['op']}, {row['size']})"


def _verdict(row: KernelRow) -> str | None:
    right = row.get("correctness")
    return right["verdict"] if right else None


def reached_words(target: dict[str, Any]) -> str:
    """What a target came to, with its interval."""
    value = target.get("reached")
    if target["metric"] in ("ceiling", "memory"):
        return formatting.share(value)
    return formatting.ratio_between(value, target.get("ci95"))


def part_of(op: KernelOp) -> KernelSection:
    """The pictures of an op: one for each series and pass in which something was timed."""
    names = list(dict.fromkeys(row["contender"] for row in op["rows"]))
    reached = [row.get("ceiling_fraction") or 0.0 for row in op["rows"] if row.get("time_ms")]
    # Where all stay far below the ceiling (tiny sizes, as on a CPU) nothing could be distinguished under it.
    fractions = all(map(_finite, reached)) and max(reached, default=0.0) >= 0.1
    figures = []
    for series in dict.fromkeys(row.get("series", "") for row in op["rows"]):
        for step in dict.fromkeys(row["step"] for row in op["rows"]):
            rows = [row for row in op["rows"] if row.get("series", "") == series and row["step"] == step]
            if (figure := _figure(op, rows, names, series, step, fractions)) is not None:
                figures.append(figure)
    away = {row["contender"]: row["reason"] for row in op["rows"] if row["status"] == "absent"}
    return KernelSection(op, tuple(figures), tuple(f"{name}: {why}" for name, why in away.items()))


def _figure(
    op: KernelOp, rows: Sequence[KernelRow], names: Sequence[str], series: str, step: str, fractions: bool
) -> Chart | None:
    timed = [row for row in rows if row.get("time_ms")]
    if not timed:
        return None
    lines = []
    for place, name in enumerate(names):
        own = [row for row in timed if row["contender"] == name]
        if own:
            points = tuple(sorted((_point(op, row, fractions) for row in own), key=lambda point: point.x))
            lines.append(
                ChartLine(letter_of(place), series_of(place), name, own[0]["kind"] == "ours", points)
            )
    title = PASS_WORDS[step] + (f", {series}" if series else "")
    return Chart(title, _picture(op, lines, title, fractions), tuple(lines))


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _point(op: KernelOp, row: KernelRow, fractions: bool) -> ChartPoint:
    time = row["time_ms"]
    assert time is not None
    x = float(row["dims"].get(op["axis"], 1))
    low, high = time["ci95"]
    description = f"{row['contender']}, {row['size']}: {formatting.milliseconds(time['median'])}"
    if not fractions:
        return ChartPoint(x, time["median"], low, high, description)
    y = row["ceiling_fraction"]
    assert y is not None
    rate = (
        formatting.si(row["bytes_per_s"], "B/s")
        if op["bound"] == "memory"
        else formatting.si(row["flops_per_s"], "FLOP/s")
    )
    description += f", {rate}, {formatting.share(y)} of the ceiling"
    return ChartPoint(x, y, y * time["median"] / high, y * time["median"] / low, description)


def _picture(op: KernelOp, lines: Sequence[ChartLine], title: str, fractions: bool) -> Markup:
    points = [point for line in lines for point in line.points]
    xs = sorted({point.x for point in points})
    top = max(max(point.high for point in points) * 1.06, 1.06 if fractions else 0.0)
    x, y = scales(xs[0], xs[-1], 1.25, top)
    label = formatting.tick_share if fractions else formatting.tick
    what = "of the measured ceiling" if fractions else "milliseconds"
    axes = y_axis(PANEL, y, ticks(0, top, 5), label, what)
    axes += x_axis(PANEL, x, xs, lambda at: formatting.tick(at) if at >= 10000 else f"{at:g}", op["axis"])
    if fractions:
        roof = path([(PANEL.left, y(1)), (PANEL.x_end, y(1))])
        axes.append(tag("path", tooltip("the measured ceiling"), class_="roof", d=roof))
    best = max(points, key=lambda point: point.y if fractions else -point.y)
    return draw_panel(f"{op['op']}, {title}. Best: {best.description}.", axes, lines, x, y)
