"""The record of a scaling study: what `scale.json` holds.

A point is one layout on one number of devices, with one number of tokens in a step. It belongs to strong scaling (the
step stays what it is and is divided), to weak scaling (the step grows with the devices), or, at the largest number of
devices, to both. An efficiency stands only beside a verdict of "equal": ranks that learn something else are no finding,
and ranks that shared a device are no speed.
"""

from __future__ import annotations

from typing import Annotated, Any, Required

from pydantic import AfterValidator, SkipValidation, TypeAdapter
from typing_extensions import TypedDict

from rush.records.ladder import STATUSES, ParityRecord
from rush.records.typed import Measurement, RecordFile, one_of

FORMAT = 1
FILE = "scale.json"
SCALINGS = ("strong", "weak")
VERDICTS = (
    "baseline", "equal", "different", "not judged", "no effect", "shared device", "unsupported", "out of memory",
    "crashed", "timed out", "diverged",
)  # fmt: skip


class ScalingEfficiency(TypedDict, total=False):
    """Tokens per second and device over those of what it is compared with."""

    ratio: float
    ci95: list[float]
    over: str
    paired: int | None
    """On how many batches they were compared one by one; None (or missing) where by their medians."""


class ExposedCommunication(TypedDict, total=False):
    """The rank that waits longest; `ranks` has the share of each."""

    share: float
    exposed_ms: float
    exchange_ms: float
    step_ms: float
    ranks: list[float]


class PointRecord(TypedDict, total=False):
    """`tokens_per_s` and what follows from it are None unless steps were timed."""

    layout: Required[str]
    sizes: SkipValidation[dict[str, int]]
    devices: Required[int]
    scalings: Required[list[Annotated[str, one_of(*SCALINGS)]]]
    peer_to_peer: SkipValidation[bool]
    shared: SkipValidation[bool]
    backend: SkipValidation[str | None]
    """The backend of the collectives (nccl, gloo); None for a single rank, and in older records."""
    status: Required[Annotated[str, one_of(*STATUSES)]]
    reason: SkipValidation[str | None]
    verdict: Required[Annotated[str, one_of(*VERDICTS)]]
    recipe: Required[str]
    digest: SkipValidation[str]
    techniques: Required[list[Any]]
    step_tokens: SkipValidation[int]
    tokens_per_s: Measurement | None
    step_ms: SkipValidation[Measurement | None]
    efficiency: Required[dict[str, SkipValidation[ScalingEfficiency]]]
    exposed: SkipValidation[ExposedCommunication | None]
    memory_bytes: SkipValidation[list[int] | None]
    """The peak of each rank."""
    evidence: Required[list[Any]]
    parity: ParityRecord | None
    predicted_tokens_per_s: SkipValidation[float | None]
    """The planner's prediction, where there is one."""
    compile_s: SkipValidation[float | None]
    warmup_s: SkipValidation[float | None]
    environment: SkipValidation[dict[str, Any]]


def _consistent(point: PointRecord) -> PointRecord:
    if not point["scalings"]:
        raise ValueError(f"scalings is []; allowed: {', '.join(SCALINGS)}")
    if point["efficiency"] and point["verdict"] != "equal":
        raise ValueError(f"an efficiency stands beside the verdict {point['verdict']!r}, which is no finding")
    if point.get("shared") and point.get("tokens_per_s") is not None:
        raise ValueError("ranks that share a device have no speed, but tokens_per_s is there")
    return point


class PointComparison(TypedDict, total=False):
    """Two points that differ in one thing; the quotients are the second's over the first's."""

    what: str
    first: str
    second: str
    devices: int
    scalings: list[str]
    speed: ScalingEfficiency | None
    real: bool
    memory: float | None


class MessageSize(TypedDict, total=False):
    bytes: float
    seconds: list[float]
    bytes_per_s: float
    bus_bytes_per_s: float


class LinkRecord(TypedDict, total=False):
    """One collective over message sizes; `reason` is set where there are none."""

    operation: Required[str]
    backend: SkipValidation[str]
    ranks: Required[int]
    peer_to_peer: SkipValidation[bool]
    sizes: Required[list[SkipValidation[MessageSize]]]
    reason: SkipValidation[str | None]


class ScaleRecord(TypedDict, total=False):
    format: int
    name: Required[str]
    started: Required[str]
    finished: SkipValidation[str | None]
    trials_s: SkipValidation[float]
    """How long all trials took together, whatever lay between them; missing in older records."""
    machine: Required[dict[str, Any]]
    base: Required[dict[str, Any]]
    devices: Required[list[int]]
    layouts: Required[list[str]]
    step_tokens: Required[int]
    tokens_per_device: SkipValidation[float]
    threads_per_rank: SkipValidation[int | None]
    counted: SkipValidation[str]
    formulas: SkipValidation[dict[str, str]]
    points: Required[list[Annotated[PointRecord, AfterValidator(_consistent)]]]
    comparisons: Required[list[SkipValidation[PointComparison]]]
    links: Required[list[LinkRecord]]
    drift: SkipValidation[dict[str, Any] | None]


SCALE = RecordFile(TypeAdapter(ScaleRecord), FILE, "scaling study", "rush scale")
read_scale, write_scale, check_scale = SCALE.read, SCALE.write, SCALE.check
