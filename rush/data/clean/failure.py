"""Errors of workers, written to files.

datatrove's executors wrap errors differently, and a Slurm job returns none. So the message for the user is written to a file
and read when a step is incomplete.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from rush.errors import DataError, MachineError, RecipeError, RushError
from rush.files import write_atomic

KINDS: dict[str, type[RushError]] = {kind.__name__: kind for kind in (DataError, MachineError, RecipeError)}


@contextlib.contextmanager
def recording_errors(folder: str, rank: int) -> Iterator[None]:
    """Write an error for the user to a file and re-raise it."""
    try:
        yield
    except RushError as error:
        path = Path(folder) / f"{rank:05d}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = type(error).__name__ if type(error).__name__ in KINDS else "DataError"
        write_atomic(path, json.dumps({"kind": kind, "message": str(error)}))
        raise


def first_error(folder: str) -> RushError | None:
    """The error of the first unit with one."""
    for path in sorted(Path(folder).glob("*.json")):
        content = json.loads(path.read_bytes())
        return KINDS[content["kind"]](content["message"])
    return None


class RecordErrors(PipelineStep):  # type: ignore[misc]
    """Records the errors of all blocks before it; the second to last block of a pass."""

    name = "errors"
    type = "rush errors"

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def run(
        self, data: Iterable[Document] | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Document]:
        with recording_errors(self.folder, rank):
            yield from data or ()
