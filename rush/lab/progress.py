"""What a ladder, a study or a race reports before and after every trial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Record = TypeVar("Record")


@dataclass(frozen=True)
class Progress(Generic[Record]):
    record: Record
    doing: str | None
    """What is measured now; None when all is done, in a race also after each leg."""
    done: int
    total: int
    seconds_left: float | None
    ended: str | None = None
    """What became of the leg of a race that ended now."""
