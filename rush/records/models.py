"""The record of an end-to-end bench: what `models.json` holds, checked when it is written and when it is read.

A workload has one rival and our recipes; each is recorded as a ladder records a rung, so the figures mean the
same there and here. Beside ours stands the target: the ratio of tokens per second to reach over the rival.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from rush.errors import DataError
from rush.files import write_json_atomic
from rush.records.ladder import STATUSES, VERDICTS, Rung

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
    file = path / FILE if path.is_dir() else path
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"there is no model bench at {file}; give a folder that `rush bench models` wrote."
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{file} is not JSON ({error}); run the bench again.") from None
    check_models(tree, str(file))
    record: ModelRecord = tree
    return record


def check_models(tree: Any, where: str) -> None:
    """Raise a DataError that names the first thing that is not as it should be."""
    if not isinstance(tree, Mapping):
        raise DataError(f"{where} holds no model bench: found {type(tree).__name__}, allowed: an object.")
    if tree.get("format") != FORMAT:
        raise DataError(f"{where}: format is {tree.get('format')!r}; this version reads format {FORMAT}.")
    for key, kind in (("started", str), ("machine", dict), ("workloads", list)):
        _of(tree, key, kind, where)
    for index, workload in enumerate(tree["workloads"]):
        here = f"{where}: workloads[{index}]"
        for key, kind in (("name", str), ("rival", dict), ("ours", list)):
            _of(workload, key, kind, here)
        _check_rung(workload["rival"], f"{here}.rival")
        for place, ours in enumerate(workload["ours"]):
            _of(ours, "rung", dict, f"{here}.ours[{place}]")
            _check_rung(ours["rung"], f"{here}.ours[{place}].rung")
            target = ours.get("target")
            if not isinstance(target, Mapping) or target.get("verdict") not in TARGET_VERDICTS:
                raise DataError(
                    f"{here}.ours[{place}]: target is {target!r:.80}; allowed verdicts: {', '.join(TARGET_VERDICTS)}."
                )


def _check_rung(rung: Mapping[str, Any], where: str) -> None:
    for key, allowed in (("status", STATUSES), ("verdict", VERDICTS)):
        if rung.get(key) not in allowed:
            raise DataError(f"{where}: {key} is {rung.get(key)!r:.80}; allowed: {', '.join(allowed)}.")
    speed = rung.get("tokens_per_s")
    if rung["status"] == "ok" and not (isinstance(speed, Mapping) and speed.get("samples")):
        raise DataError(f"{where}: status is ok but tokens_per_s has no samples.")


def _of(tree: Any, key: str, kind: type, where: str) -> None:
    found = tree.get(key) if isinstance(tree, Mapping) else None
    if not isinstance(found, kind):
        raise DataError(f"{where}: {key} is {found!r:.80}; the record is damaged or no model bench.")
