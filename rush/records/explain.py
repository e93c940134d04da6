"""The record of an explanation: what `explain.json` holds.

A record may come from anywhere, so every number in it must be finite and of a size that a chart can hold.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Required

from pydantic import AfterValidator, SkipValidation, TypeAdapter
from typing_extensions import TypedDict

from rush.records.typed import RecordFile

FORMAT = "rush explain"
LARGEST, DEEPEST = 1e60, 12


def _drawable(value: Any, where: str = "", depth: int = 0) -> Any:
    if depth > DEEPEST:
        raise ValueError(f"{where} is nested deeper than {DEEPEST} levels")
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            _drawable(part, f"{where}.{key}", depth + 1)
    elif isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) <= LARGEST:
        raise ValueError(f"{where} is {value!r:.80}, which cannot be drawn")
    return value


class ExplainMachine(TypedDict, total=False):
    summary: Required[str]
    cores: SkipValidation[int]
    os: SkipValidation[str]
    python: SkipValidation[str]
    torch: SkipValidation[str]
    cuda: SkipValidation[str | None]
    driver: SkipValidation[str | None]


class ExplainRecord(TypedDict, total=False):
    format: str
    version: Required[Literal[1]]
    topic: Required[str]
    device: Required[str]
    quick: Required[bool]
    options: SkipValidation[dict[str, Any]]
    machine: Required[Annotated[ExplainMachine, AfterValidator(_drawable)]]
    measured: Required[str]
    seconds: Required[Annotated[float, AfterValidator(_drawable)]]
    load: Annotated[float | None, AfterValidator(_drawable)]
    """Load average per core when the measuring began."""
    data: Required[Annotated[dict[str, Any], AfterValidator(_drawable)]]


EXPLAIN = RecordFile(TypeAdapter(ExplainRecord), "explain.json", "explanation", "rush explain TOPIC", FORMAT)
