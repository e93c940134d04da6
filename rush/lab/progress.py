"""A progress message of a ladder, a study or a race, sent before and after every trial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Record = TypeVar("Record")


@dataclass(frozen=True)
class Progress(Generic[Record]):
    record: Record
    doing: str | None
    """The current measurement; None at the end, and in a race also after each leg."""
    done: int
    total: int
    seconds_left: float | None
    ended: str | None = None
    """The outcome of the race's leg that has just ended."""
