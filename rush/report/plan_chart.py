"""A planner's chart as a page, a picture and a table, from its record alone."""

from __future__ import annotations

from pathlib import Path

from rush.files import write_atomic, writing
from rush.records.plan_chart import PLAN_CHART, PlanChartRecord, PredictedPoint, RefusedPoint
from rush.report import formatting
from rush.report.page import render
from rush.report.panel_file import standalone
from rush.report.panel_svg import pictures
from rush.report.plan_panels import panels
from rush.report.plan_words import sentences

COLUMNS = ("what", "at", "tokens/s each", "GiB of one", "verdict")


def write_chart(record: PlanChartRecord, folder: Path) -> dict[str, Path]:
    """The record, the page and the picture in a folder; their paths."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    paths = {
        "record": folder / PLAN_CHART.file,
        "report": folder / "report.html",
        "picture": folder / "picture.svg",
    }
    PLAN_CHART.write(paths["record"], record)
    write_atomic(paths["report"], chart_page(record))
    write_atomic(paths["picture"], chart_picture(record))
    return paths


def chart_picture(record: PlanChartRecord) -> str:
    return standalone(record["title"], where(record), panels(record)) + "\n"


def where(record: PlanChartRecord) -> str:
    """What was planned for, in one line."""
    machines = list(dict.fromkeys(point["machine"] for point in record["predicted"]))
    filled = (
        "filled marks: measured and published by others" if record["published"] else "nothing of it published"
    )
    return f"planned by rush, not measured: {', '.join(machines)}; {filled}"


def chart_page(record: PlanChartRecord) -> str:
    return render(
        "plan_chart.html",
        ("style.css", "explain.css", "plan_chart.css"),
        title=f"{record['title']} · plan",
        record=record,
        sentences=sentences(record),
        where=where(record),
        panels=[(panel, *pictures(panel)) for panel in panels(record)],
        columns=COLUMNS,
        rows=rows(record),
        published=[
            (
                run["name"],
                f"{run['tokens_per_s'] / run['devices']:,.0f}",
                f"{run['planned']['tokens_per_s'] / run['devices']:,.0f}",
                _gib(run.get("memory_bytes")),
                _gib(run["planned_reserved_bytes"]),
                run["source"],
            )
            for run in record["published"]
        ],
    )


def rows(record: PlanChartRecord) -> list[tuple[str, ...]]:
    """Every plan as a line of a table."""
    found = [_row(point) for point in record["predicted"]]
    return found + [
        (_title(point), f"{point['x']:g}", "", "", "cannot be planned") for point in record["refused"]
    ]


def _row(point: PredictedPoint) -> tuple[str, ...]:
    error = point["expected_error"]
    verdict = "does not fit" if not point["fits"] else "tight" if point["tight"] else "fits"
    return (
        _title(point),
        f"{point['x']:g}",
        f"{point['tokens_per_s'] / point['devices']:,.0f} ±{100 * error['time']:.0f} %",
        f"{_gib(point['needed_bytes'])}/{_gib(point['room_bytes'])} ±{100 * error['memory']:.0f} %",
        f"{verdict}, not by rush" if point["problems"] else verdict,
    )


def _title(point: PredictedPoint | RefusedPoint) -> str:
    """Picture, line and name, each said once."""
    words = [word for word in (point["group"], point["series"], point["name"]) if word]
    kept = [w for place, w in enumerate(words) if not any(w in other for other in words[place + 1 :])]
    return ": ".join(kept)


def _gib(value: float | None) -> str:
    return formatting.MISSING if value is None else f"{value / 2**30:.1f}"
