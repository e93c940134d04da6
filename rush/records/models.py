"""The record of an end-to-end bench: what `models.json` holds, checked when it is written and when it is read.

A workload has one rival and our recipes; each is recorded as a ladder records a rung, so the figures mean the
same there and here. Beside ours stands the target: the ratio of tokens per second to reach over the rival.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from rush.errors import DataError
from rush.files import write_json_atomic
from rush.records.checked import check_head, check_of, read_json
from rush.records.ladder import Rung, check_rung

FORMAT = 1
FILE = "models.json"
TARGET_VERDICTS = ("reached", "missed", "not measured")


class Target(TypedDict, total=False):
    at_least: float
    reached: float | None
    ci95: list[float] | None
    verdict: str
    why: str | None


class Ours(TypedDict, total=False):
    rung: Rung
    target: Target


class Workload(TypedDict, total=False):
    name: str
    about: str
    micro: int
    sequence: int
    rival_kind: str
    rival_versions: dict[str, str]
    rival: Rung
    ours: list[Ours]


class ModelRecord(TypedDict, total=False):
    format: int
    started: str
    finished: str | None
    machine: dict[str, Any]
    ceilings: dict[str, Any] | None
    peaks: dict[str, float] | None
    formulas: dict[str, str]
    workloads: list[Workload]


def write_models(folder: Path, record: ModelRecord) -> None:
    """Check the record and replace the file in one piece."""
    check_models(record, str(folder / FILE))
    write_json_atomic(folder / FILE, record)


def read_models(path: Path) -> ModelRecord:
    """The record in a file or in a bench's folder; a DataError when it is something else."""
    tree, file = read_json(path, FILE, "model bench", "rush bench models")
    check_models(tree, str(file))
    record: ModelRecord = tree
    return record


def check_models(tree: Any, where: str) -> None:
    """Raise a DataError that names the first thing that is not as it should be."""
    check_head(tree, "model bench", FORMAT, where)
    for key, kind in (("started", str), ("machine", dict), ("workloads", list)):
        check_of(tree, key, kind, where)
    for index, workload in enumerate(tree["workloads"]):
        here = f"{where}: workloads[{index}]"
        for key, kind in (("name", str), ("rival", dict), ("ours", list)):
            check_of(workload, key, kind, here)
        check_rung(workload["rival"], f"{here}.rival")
        for place, ours in enumerate(workload["ours"]):
            check_of(ours, "rung", dict, f"{here}.ours[{place}]")
            check_rung(ours["rung"], f"{here}.ours[{place}].rung")
            target = ours.get("target")
            if not isinstance(target, Mapping) or target.get("verdict") not in TARGET_VERDICTS:
                raise DataError(
                    f"{here}.ours[{place}]: target is {target!r:.80}; allowed verdicts: {', '.join(TARGET_VERDICTS)}."
                )
