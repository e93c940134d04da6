"""The record of a ladder: what `ladder.json` holds.

One record has a machine, a base recipe and rungs; each rung has a status (how the trial ended), raw samples with
their interval, evidence, parity and a verdict. Statuses and verdicts are closed lists, so that whoever draws or
compares ladders knows every word that can come.
"""

from __future__ import annotations

from typing import Annotated, Any, Required

from pydantic import AfterValidator, SkipValidation, TypeAdapter
from typing_extensions import TypedDict

from rush.records.life import RecordedLife
from rush.records.race import NetRecord
from rush.records.typed import Measurement, RecordFile, having, one_of

FORMAT = 1
STATUSES = ("ok", "out_of_memory", "unsupported", "no_effect", "diverged", "crashed", "timed_out")
VERDICTS = (
    "baseline", "equal and faster", "equal and smaller", "faster but different", "smaller but different", "different", "no gain", "cannot tell",
    "slower", "no effect", "unsupported", "out of memory", "crashed", "timed out", "diverged", "unusable",
)  # fmt: skip


ParityRecord = Annotated[dict[str, Any], having("verdict", "equal", "different", "not judged")]
"""`class` is what was promised. Later versions add, all optional: `measured` (same bits, rounding, statistical, or None) and `gap`
(relative to the decrease of the loss), `kind` and `differences` (what differs, by name), `timed` (the timed steps against plain fp32;
`compared`: how many) and `after_timing` (the steps after them)."""


class GainRecord(TypedDict, total=False):
    over: str
    ratio: float
    ci95: list[float]
    real: bool
    paired: int | None
    """On how many batches the two were compared one by one; None (or missing) where by their medians."""


class DisturbedRecord(TypedDict, total=False):
    """One process that another program slowed down. Its samples are recorded, but excluded from every interval."""

    process: int
    """Its place in `tokens_per_s.processes`."""
    ratio: float
    """Its median rate over that of the others."""
    again: int
    """How many processes were measured beyond the planned ones for it."""


class RungRecord(TypedDict, total=False):
    """One rung. `tokens_per_s` and what follows from it are None unless steps were timed."""

    name: Required[str]
    title: SkipValidation[str]
    adds: SkipValidation[list[Any] | dict[str, Any]]
    techniques: Required[list[Any]]
    recipe: Required[str]
    digest: SkipValidation[str]
    kept: SkipValidation[bool]
    status: Required[Annotated[str, one_of(*STATUSES)]]
    reason: SkipValidation[str | None]
    tokens_per_s: Measurement | None
    step_ms: SkipValidation[Measurement | None]
    tokens_kind: SkipValidation[dict[str, float] | None]
    mfu: SkipValidation[float | None]
    hfu: SkipValidation[float | None]
    ceiling_fraction: SkipValidation[float | None]
    peak_memory_bytes: SkipValidation[int | None]
    compile_s: SkipValidation[float | None]
    warmup_s: SkipValidation[float | None]
    warmup_steps: SkipValidation[int | None]
    data_wait_ms: SkipValidation[float | None]
    breakdown_ms: SkipValidation[dict[str, float] | None]
    longest: SkipValidation[list[dict[str, Any]] | None]
    environment: SkipValidation[dict[str, Any]]
    flops_per_token: SkipValidation[float]
    step_tokens: SkipValidation[int]
    micro: SkipValidation[int]
    sequence: SkipValidation[int]
    evidence: Required[list[Any]]
    parity: ParityRecord | None
    life: RecordedLife | None
    """None (or missing) where no life was tried."""
    disturbed: SkipValidation[DisturbedRecord | None]
    """None (or missing) where no process was."""
    gain: SkipValidation[GainRecord | None]
    total_gain: SkipValidation[GainRecord | None]
    net: SkipValidation[NetRecord | None]
    """The result of a race with the rung that the gain is relative to; missing without a race."""
    claim: SkipValidation[dict[str, Any] | None]
    verdict: Required[Annotated[str, one_of(*VERDICTS)]]


def _timed(rung: RungRecord) -> RungRecord:
    if rung["status"] == "ok" and rung.get("tokens_per_s") is None:
        raise ValueError("status is ok but tokens_per_s is missing")
    return rung


RecordedRung = Annotated[RungRecord, AfterValidator(_timed)]


class LadderRecord(TypedDict, total=False):
    format: int
    name: Required[str]
    view: Required[Annotated[str, one_of("cumulative", "alone", "left_out")]]
    started: Required[str]
    finished: SkipValidation[str | None]
    trials_s: SkipValidation[float]
    """How long the trials and lives of the rungs took together, whatever lay between them. Missing in older records, whose
    `started` and `finished` may be those of the last session."""
    machine: Required[dict[str, Any]]
    ceilings: SkipValidation[dict[str, Any] | None]
    peaks: SkipValidation[dict[str, float] | None]
    base: Required[dict[str, Any]]
    formulas: SkipValidation[dict[str, str]]
    claim: SkipValidation[dict[str, Any] | None]
    """The claimed gain of the whole ladder over its first rung; missing in older records."""
    rungs: Required[list[RecordedRung]]
    counted: SkipValidation[str]
    drift: SkipValidation[dict[str, Any] | None]
    batch_curve: SkipValidation[list[dict[str, Any]] | None]
    batch_stops_paying_at: SkipValidation[int | None]
    sequence_limits: SkipValidation[list[dict[str, Any]] | None]
    interactions: SkipValidation[list[dict[str, Any]] | None]


LADDER = RecordFile(TypeAdapter(LadderRecord), "ladder.json", "ladder", "rush ladder")
read_ladder, write_ladder, check_ladder = LADDER.read, LADDER.write, LADDER.check
