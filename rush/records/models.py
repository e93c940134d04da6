"""The record of an end-to-end bench: what `models.json` holds, checked when it is written and when it is read.

A workload has one rival and our recipes; each is recorded as a ladder records a rung, so the figures mean the
same there and here. Beside ours stands the target: the ratio of tokens per second to reach over the rival, and where
one is asked for, the ratio of peak memory not to exceed. A workload that asks how long a sequence fits has no rival,
but lengths that were tried and the figure others published.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from rush.errors import DataError
from rush.files import write_json_atomic
from rush.records.checked import check_head, check_in, check_of, read_json
from rush.records.ladder import STATUSES, RungRecord, check_rung
from rush.records.life import LifeRecord, check_life

FORMAT = 1
FILE = "models.json"
TARGET_VERDICTS = ("reached", "missed", "not measured")


class MemoryTarget(TypedDict, total=False):
    at_most: float
    reached: float | None
    """Peak memory over the rival's."""
    verdict: str
    why: str | None


class SpeedTarget(TypedDict, total=False):
    at_least: float
    reached: float | None
    ci95: list[float] | None
    verdict: str
    why: str | None
    memory: MemoryTarget
    """There only where a workload asks for it."""


class OursRecord(TypedDict, total=False):
    rung: RungRecord
    target: SpeedTarget
    primary: bool
    """Whether the workload's target is for this one; others were measured beside it. True where it is not said."""


class LengthRecord(TypedDict, total=False):
    """One length that was tried."""

    sequence: int
    status: str
    reason: str | None
    tokens_per_s: float | None
    step_s: float | None
    cold: bool
    """The step was the first one, compiling and all: its speed is a lower bound."""
    peak_memory_bytes: int | None


class LongestRecord(TypedDict, total=False):
    techniques: list[str]
    recipe: str
    limit_bytes: int
    published: int
    source: str
    found: LengthRecord | None
    """The longest that fitted."""
    fails_at: int | None
    """The shortest that was seen not to fit."""
    tried: list[LengthRecord]
    evidence: list[dict[str, Any]]
    """What the techniques left in a profile, at the shortest length."""
    parity: dict[str, Any] | None
    """Against the same method in plain fp32."""
    life: LifeRecord | None
    """At the shortest length; None (or missing) where none was tried."""


class ProcessTime(TypedDict, total=False):
    """How long one process of a workload ran, and its parts."""

    who: str
    wall_s: float
    parts: dict[str, float]


class WorkloadRecord(TypedDict, total=False):
    name: str
    about: str
    micro: int
    sequence: int
    rival_kind: str
    rival_versions: dict[str, str]
    rival_weights: str | None
    """What the rival trains and what it leaves frozen, in which dtypes."""
    rival: RungRecord
    ours: list[OursRecord]
    longest: LongestRecord
    """In place of rival and ours."""
    took: list[ProcessTime]


class ModelRecord(TypedDict, total=False):
    format: int
    started: str
    finished: str | None
    machine: dict[str, Any]
    ceilings: dict[str, Any] | None
    peaks: dict[str, float] | None
    formulas: dict[str, str]
    workloads: list[WorkloadRecord]


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
        check_of(workload, "name", str, here)
        if "longest" in workload:
            _check_longest(workload["longest"], f"{here}.longest")
            continue
        for key, kind in (("rival", dict), ("ours", list)):
            check_of(workload, key, kind, here)
        check_rung(workload["rival"], f"{here}.rival")
        for place, ours in enumerate(workload["ours"]):
            check_of(ours, "rung", dict, f"{here}.ours[{place}]")
            check_rung(ours["rung"], f"{here}.ours[{place}].rung")
            _check_target(ours.get("target"), f"{here}.ours[{place}]")


def _check_target(target: Any, here: str) -> None:
    told = [target, *([target["memory"]] if isinstance(target, Mapping) and "memory" in target else [])]
    for one in told:
        if not isinstance(one, Mapping) or one.get("verdict") not in TARGET_VERDICTS:
            raise DataError(f"{here}: target is {one!r:.80}; allowed verdicts: {', '.join(TARGET_VERDICTS)}.")


def _check_longest(longest: Any, here: str) -> None:
    for key, kind in (("limit_bytes", int), ("published", int), ("source", str), ("tried", list)):
        check_of(longest, key, kind, here)
    check_life(longest, here)
    for place, tried in enumerate(longest["tried"]):
        check_of(tried, "sequence", int, f"{here}.tried[{place}]")
        check_in(tried, "status", STATUSES, f"{here}.tried[{place}]")


def targets_of(record: ModelRecord) -> list[SpeedTarget]:
    """The targets that count: those of the primary recipe of each workload."""
    return [
        ours["target"]
        for workload in record["workloads"]
        for ours in workload.get("ours", [])
        if ours.get("primary", True)
    ]


def verdicts_of(record: ModelRecord) -> list[str]:
    """One verdict for each thing that was wanted: of speed, and of memory where it was asked for."""
    return [
        one["verdict"]
        for target in targets_of(record)
        for one in (target, *([target["memory"]] if "memory" in target else []))
    ]
