"""The page of any folder, written again from its record. The record file determines the kind of the folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rush.errors import DataError
from rush.files import write_atomic
from rush.records.kernels import KERNELS
from rush.records.ladder import LADDER
from rush.records.models import MODELS
from rush.records.plan_chart import PLAN_CHART
from rush.records.race import RACE
from rush.records.run_status import KINDS, kind_of
from rush.records.scaling import SCALE
from rush.records.tune import TUNE
from rush.records.typed import RecordFile, fitting
from rush.report.kernels import kernel_page
from rush.report.ladder import read_ladder
from rush.report.models import model_page
from rush.report.page import report_page
from rush.report.plan_chart import chart_page
from rush.report.race import race_page
from rush.report.run_page import Complete, run_page
from rush.report.run_view import read_run
from rush.report.scaling import scale_page
from rush.report.tune import tune_page

PAGES: dict[str, Callable[[Path], str]] = {
    "ladder": lambda folder: report_page(read_ladder(folder)),
    "tune": lambda folder: tune_page(TUNE.read(folder)),
    "scale": lambda folder: scale_page(SCALE.read(folder)),
    "race": lambda folder: race_page(RACE.read(folder)),
    "kernels": lambda folder: kernel_page(KERNELS.read(folder)),
    "models": lambda folder: model_page(MODELS.read(folder)),
    "plan": lambda folder: chart_page(PLAN_CHART.read(folder)),
}
RECORDS: dict[str, RecordFile[Any]] = {
    "ladder": LADDER,
    "tune": TUNE,
    "scale": SCALE,
    "race": RACE,
    "kernels": KERNELS,
    "models": MODELS,
    "plan": PLAN_CHART,
}


def known_kind(folder: Path) -> str:
    """The kind of the folder, or an error message."""
    try:
        os.stat(folder)
    except OSError as error:
        raise DataError(
            f"{folder} cannot be read ({error.strerror}); give a folder that rush train, ladder, tune, scale, race, bench, plan --chart or explain wrote."
        ) from None
    kind = kind_of(folder)
    if kind is None:
        raise DataError(
            f"{folder} holds no record; a folder of a run has metrics.jsonl, others have one of {', '.join(KINDS.values())}. "
            "Give a folder that rush train, ladder, tune, scale, race, bench, plan --chart or explain wrote."
        )
    return kind


def page_of(folder: Path, complete: Complete | None = None) -> str:
    """The page of a run, ladder, search, study or bench. Explanations are drawn by `rush.explain`."""
    kind = known_kind(folder)
    if kind == "run":
        with fitting(str(folder), "run", "rush train"):
            return run_page(read_run(folder), complete)
    with RECORDS[kind].using(folder):
        return PAGES[kind](folder)


def redraw(folder: Path, html: Path, complete: Complete | None = None) -> None:
    """Write the page of a folder into one self-contained file."""
    write_atomic(html, page_of(folder, complete))
