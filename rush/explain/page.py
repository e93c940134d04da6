"""The HTML page of an explanation: the report's frame, style and policy, one template of its own."""

from __future__ import annotations

from pathlib import Path

from rush.explain.records import Explanation
from rush.files import write_atomic, write_json_atomic, writing
from rush.report import formatting
from rush.report.page import render
from rush.report.panel_file import standalone
from rush.report.panel_svg import pictures


def page(explanation: Explanation) -> str:
    """One self-contained file; the same record always gives the same bytes."""
    record = explanation.record
    machine = [
        (str(key), formatting.MISSING if value is None else str(value))
        for key, value in record["machine"].items()
    ]
    return render(
        "explain.html",
        ("style.css", "explain.css"),
        title=explanation.topic.title,
        topic=explanation.topic,
        sentences=explanation.words,
        where=explanation.where,
        warning=explanation.warning,
        measured=formatting.moment(record["measured"]),
        panels=[(panel, *pictures(panel)) for panel in explanation.panels],
        table=explanation.table,
        machine=machine,
    )


def write(explanation: Explanation, folder: Path) -> dict[str, Path]:
    """The record, the page and the picture in a folder; their paths."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    paths = {
        "record": folder / "explain.json",
        "report": folder / "report.html",
        "picture": folder / "picture.svg",
    }
    write_json_atomic(paths["record"], explanation.record)
    write_atomic(paths["report"], page(explanation))
    write_atomic(paths["picture"], picture(explanation))
    return paths


def picture(explanation: Explanation) -> str:
    return standalone(explanation.topic.title, explanation.where, explanation.panels) + "\n"
