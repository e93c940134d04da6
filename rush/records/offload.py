"""The record of `rush bench offload`: what `offload.json` holds."""

from __future__ import annotations

from typing import Annotated, Any, Required

from pydantic import Field, SkipValidation, TypeAdapter
from typing_extensions import TypedDict

from rush.records.typed import RecordFile, one_of

FORMAT = 1
FILE = "offload.json"
WHERE = ("cpu", "disk")
CONTENDERS = ("rush", "accelerate")
Positive = Annotated[float, Field(gt=0)]


class OffloadProcess(TypedDict):
    """One fresh process: load, read the prompt, then one token after another."""

    load_s: Positive
    first_token_s: Positive
    token_s: Annotated[list[Positive], Field(min_length=1)]
    """Seconds of every further token."""
    device_bytes: Annotated[int, Field(ge=0)]
    """Peak of the allocator; 0 on a CPU."""
    host_bytes: Annotated[int, Field(gt=0)]
    """Peak resident memory of the process, mapped pages of files included."""
    imports_bytes: SkipValidation[int]
    """What of it the process had before it loaded the model."""
    ids: list[int]


class OffloadRow(TypedDict, total=False):
    shape: Required[str]
    layers: Required[Annotated[int, Field(ge=1)]]
    of_layers: Required[Annotated[int, Field(ge=1)]]
    """Layers of the full shape; fewer were timed if it did not fit."""
    weight_bytes: Required[Annotated[int, Field(gt=0)]]
    where: Required[Annotated[str, one_of(*WHERE)]]
    contender: Required[Annotated[str, one_of(*CONTENDERS)]]
    status: Required[Annotated[str, one_of("ok", "absent", "failed")]]
    reason: Required[str]
    processes: Required[list[OffloadProcess]]
    tokens_per_s: SkipValidation[dict[str, float]]
    """Median and 95 % interval, without the first token."""
    same_ids: SkipValidation[bool | None]
    """Whether all contenders chose the same tokens (greedily)."""


class OffloadRecord(TypedDict, total=False):
    format: int
    machine: Required[dict[str, Any]]
    dtype: Required[str]
    prompt_tokens: Required[Annotated[int, Field(ge=1)]]
    new_tokens: Required[Annotated[int, Field(ge=2)]]
    rows: Required[list[OffloadRow]]


OFFLOAD = RecordFile(TypeAdapter(OffloadRecord), FILE, "bench of offloaded inference", "rush bench offload")
