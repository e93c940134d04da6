"""The record of a planner's chart: what `plan-chart.json` holds.

A prediction is a plan: its speed, its memory by part, its expected error, whether it fits and whether this
trainer can run it. A published point is a measurement of another trainer, with its source and with the plan
of the same run. So a picture can show both with different marks, and a reader sees the planner's error
against measurements.
"""

from __future__ import annotations

from typing import Annotated, Any, Required

from pydantic import AfterValidator, Field, SkipValidation, TypeAdapter
from typing_extensions import TypedDict

from rush.records.typed import RecordFile, one_of

FORMAT = 1
FILE = "plan-chart.json"
CHARTS = ("speedup", "memory", "zero", "links", "cards", "nodes", "layouts", "batch")
Positive = Annotated[float, Field(gt=0)]


class StatedError(TypedDict):
    """What the planner states about itself, as fractions."""

    memory: Annotated[float, Field(ge=0)]
    time: Annotated[float, Field(ge=0)]


NO_CHECKPOINTING = "no checkpointing"
"""The series without checkpointing of the chart `batch`."""
SAME_STEP, GROWING_STEP, BEST_RECIPE = MODES = ("the same step", "a step that grows", "the best recipe")
"""What the chart `cards` keeps where it compares more devices with one: its groups are a recipe's name and one of these."""


class PredictedPoint(TypedDict, total=False):
    series: Required[str]
    """The line that the point is on."""
    group: Required[str]
    """The picture that the line is in."""
    x: Required[Positive]
    """Devices, nodes or the micro batch, as the chart's axis says."""
    name: Required[str]
    """What was planned, in a few words."""
    machine: Required[str]
    devices: Required[Annotated[int, Field(ge=1)]]
    layout: SkipValidation[dict[str, int]]
    tokens_per_s: Required[Positive]
    """Tokens per second of all devices."""
    mfu: SkipValidation[float | None]
    step_tokens: SkipValidation[int]
    time_s: Required[dict[str, float]]
    """By part; their sum is the step."""
    memory_bytes: Required[dict[str, int]]
    """By part, of one device at the peak of a step."""
    needed_bytes: Required[Positive]
    """What a whole run takes of one device."""
    room_bytes: Required[Positive]
    fits: Required[bool]
    tight: Required[bool]
    """It fits, by less than the stated error."""
    problems: Required[list[str]]
    """Why this trainer cannot run it, other than memory."""
    expected_error: Required[StatedError]
    how: Required[str]
    """Where the rates come from: measured here, calibrated, datasheet, assumed."""


class RefusedPoint(TypedDict):
    """A layout that cannot be planned, as one that does not divide the batch."""

    series: str
    group: str
    x: float
    name: str
    reason: str


class PublishedPoint(TypedDict, total=False):
    """A measurement of another trainer."""

    name: Required[str]
    series: Required[str]
    group: Required[str]
    x: Required[Positive]
    source: Required[str]
    devices: Required[Annotated[int, Field(ge=1)]]
    tokens_per_s: Required[Positive]
    """Tokens per second of all devices, from the published figure per device."""
    memory_bytes: SkipValidation[float | None]
    """What the allocator had reserved, where that was published."""
    planned: Required[PredictedPoint]
    """The plan of the same run."""
    planned_reserved_bytes: Required[Positive]
    """What of that plan compares with published memory."""


def _consistent(point: PredictedPoint) -> PredictedPoint:
    if point["tight"] and not point["fits"]:
        raise ValueError(
            "tight is true where fits is false; a tight plan is one that fits by less than its error"
        )
    return point


class PlanChartRecord(TypedDict, total=False):
    format: int
    chart: Required[Annotated[str, one_of(*CHARTS)]]
    title: Required[str]
    command: Required[str]
    """What writes this record."""
    options: Required[dict[str, Any]]
    predicted: Required[list[Annotated[PredictedPoint, AfterValidator(_consistent)]]]
    refused: Required[list[RefusedPoint]]
    published: Required[list[PublishedPoint]]
    sources: Required[list[str]]
    """Sources of the rates."""


PLAN_CHART = RecordFile(TypeAdapter(PlanChartRecord), FILE, "chart of plans", "rush plan --chart")
