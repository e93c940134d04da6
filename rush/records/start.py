"""The record of `rush start`: the findings, the decisions with reasons, and the planner's prediction."""

from __future__ import annotations

from typing import Annotated, Any, Required

from pydantic import SkipValidation, TypeAdapter
from typing_extensions import TypedDict

from rush.records.typed import RecordFile, one_of

FORMAT = 1


class DecisionRow(TypedDict):
    key: str
    """A key of the recipe."""
    value: Any
    why: str
    given: bool
    """Whether it was given as an override."""


class StartData(TypedDict):
    files: list[str]
    rows: int
    formats: dict[str, int]
    broken: int
    broken_reasons: dict[str, int]
    first_broken: str
    duplicates: int
    roles: dict[str, int]
    documents: int
    tokens: int
    median_tokens: int
    p95_tokens: int
    longest_tokens: int
    measured: int
    """Documents whose length was measured."""
    histogram: list[list[int]]
    """From, below, documents."""
    target_share: float


class StartPlan(TypedDict):
    device: str
    why: str
    """Why this device."""
    machine: str | None
    """Its name for `rush plan --machine`; None: this machine."""
    memory_bytes: int
    limit_bytes: int
    fits: bool
    tokens_per_s: float
    expected_error: dict[str, float]
    step_s: float
    steps: int
    epochs: float
    hours: float
    cost: float | None


class StartRecord(TypedDict, total=False):
    format: Required[int]
    model: Required[dict[str, Any]]
    data: Required[StartData]
    objective: Required[Annotated[str, one_of("lm", "sft", "dpo")]]
    method: Required[Annotated[str, one_of("full", "lora", "qlora")]]
    decisions: Required[list[DecisionRow]]
    plan: Required[StartPlan]
    notes: Required[list[str]]
    next: SkipValidation[list[str]]
    """Commands for what comes next; empty where no file was written."""
    recipe: SkipValidation[dict[str, Any]]


FILE = RecordFile(TypeAdapter(StartRecord), "start.json", "record of a start", "rush start --json", FORMAT)
