"""The record of an end-to-end bench: what `models.json` holds.

A workload has one baseline (key `rival`) and our recipes, each recorded like a rung of a ladder. Ours also
have the target: the ratio of tokens per second to reach over the baseline, and optionally the ratio of peak
memory not to exceed. A workload for the longest sequence has no baseline, but the lengths that were tried and
the published figure.
"""

from __future__ import annotations

from typing import Annotated, Any, Required

from pydantic import AfterValidator, SkipValidation, TypeAdapter
from typing_extensions import TypedDict

from rush.records.ladder import STATUSES, RecordedRung
from rush.records.life import RecordedLife
from rush.records.targets import target_word
from rush.records.typed import RecordFile, one_of

FORMAT = 1
FILE = "models.json"
TargetVerdict = Annotated[str, one_of("reached", "missed", "not measured")]


class MemoryTarget(TypedDict, total=False):
    at_most: SkipValidation[float]
    reached: SkipValidation[float | None]
    """Peak memory over the baseline's."""
    verdict: Required[TargetVerdict]
    why: SkipValidation[str | None]


class SpeedTarget(TypedDict, total=False):
    at_least: SkipValidation[float]
    reached: SkipValidation[float | None]
    ci95: SkipValidation[list[float] | None]
    verdict: Required[TargetVerdict]
    why: SkipValidation[str | None]
    memory: MemoryTarget
    """Present only if a workload sets it."""


class OursRecord(TypedDict, total=False):
    rung: Required[RecordedRung]
    target: Required[SpeedTarget]
    primary: SkipValidation[bool]
    """Whether the workload's target is for this one; others were measured beside it. True where it is missing."""


class LengthRecord(TypedDict, total=False):
    """One length that was tried."""

    sequence: Required[int]
    status: Required[Annotated[str, one_of(*STATUSES)]]
    reason: SkipValidation[str | None]
    tokens_per_s: SkipValidation[float | None]
    step_s: SkipValidation[float | None]
    cold: SkipValidation[bool]
    """The step was the first one, compilation included: its speed is a lower bound."""
    peak_memory_bytes: SkipValidation[int | None]


class LongestRecord(TypedDict, total=False):
    techniques: SkipValidation[list[str]]
    recipe: SkipValidation[str]
    limit_bytes: Required[int]
    published: Required[int]
    source: Required[str]
    found: SkipValidation[LengthRecord | None]
    """The longest that fitted."""
    fails_at: SkipValidation[int | None]
    """The shortest that was seen not to fit."""
    tried: Required[list[LengthRecord]]
    evidence: SkipValidation[list[dict[str, Any]]]
    """What the techniques left in a profile, at the shortest length."""
    parity: SkipValidation[dict[str, Any] | None]
    """Against the same method in plain fp32."""
    life: RecordedLife | None
    """At the shortest length; None (or missing) where none was tried."""


class ProcessTime(TypedDict, total=False):
    """How long one process of a workload ran, and its parts."""

    who: str
    wall_s: float
    parts: dict[str, float]


class WorkloadRecord(TypedDict, total=False):
    name: Required[str]
    about: SkipValidation[str]
    micro: SkipValidation[int]
    sequence: SkipValidation[int]
    rival_kind: SkipValidation[str]
    rival_versions: SkipValidation[dict[str, str]]
    rival_weights: SkipValidation[str | None]
    """What the baseline trains and what it leaves frozen, in which dtypes."""
    rival: RecordedRung
    """The baseline."""
    ours: list[OursRecord]
    longest: LongestRecord
    """In place of rival and ours."""
    took: SkipValidation[list[ProcessTime]]


def _has_both(workload: WorkloadRecord) -> WorkloadRecord:
    if "longest" not in workload:
        for key in ("rival", "ours"):
            if key not in workload:
                raise ValueError(f"{key} is missing")
    return workload


class ModelRecord(TypedDict, total=False):
    format: int
    started: Required[str]
    finished: SkipValidation[str | None]
    machine: Required[dict[str, Any]]
    ceilings: SkipValidation[dict[str, Any] | None]
    peaks: SkipValidation[dict[str, float] | None]
    formulas: SkipValidation[dict[str, str]]
    workloads: Required[list[Annotated[WorkloadRecord, AfterValidator(_has_both)]]]


MODELS = RecordFile(TypeAdapter(ModelRecord), FILE, "model bench", "rush bench models")
read_models, write_models, check_models = MODELS.read, MODELS.write, MODELS.check


def targets_of(record: ModelRecord) -> list[SpeedTarget]:
    """The targets that count: those of the primary recipe of each workload."""
    return [
        ours["target"]
        for workload in record["workloads"]
        for ours in workload.get("ours", [])
        if ours.get("primary", True)
    ]


def verdicts_of(record: ModelRecord) -> list[str]:
    """One word for each thing that was wanted: of speed, and of memory where it was asked for."""
    return [
        target_word(one)
        for target in targets_of(record)
        for one in (target, *([target["memory"]] if "memory" in target else []))
    ]
