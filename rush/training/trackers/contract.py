"""The tracker interface: logs metrics, samples and the end of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from rush.recipe import Recipe

PROJECT = "rush"
"""The project, or experiment, of runs whose recipe names none."""


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    how: Literal["finished", "interrupted", "failed"]
    reason: str = ""
    """The message of a failure."""

    def __str__(self) -> str:
        return f"{self.how}: {self.reason}" if self.reason else self.how


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker is opened for."""

    recipe: Recipe
    folder: Path
    first_step: int
    project: str | None
    """As the recipe names it."""
    id: str | None
    """Id of the tracker's run to continue; None for a new one."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name


class Tracker(Protocol):
    id: str
    """Id of its run, to continue it after a resume."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...
    def sample(self, step: int, text: str) -> None: ...
    def end(self, ended: Ended) -> None: ...
