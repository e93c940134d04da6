"""An error in a worker, kept where the one who started it will find it.

The engines hand errors back each in their own wrapping, or not at all: a Slurm job only ends. So the sentence
for the user is also written down, and read when a step turns out incomplete.
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
def noting_errors(folder: str, rank: int) -> Iterator[None]:
    """Write an error for the user to a file, and let it pass."""
    try:
        yield
    except RushError as error:
        path = Path(folder) / f"{rank:05d}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = type(error).__name__ if type(error).__name__ in KINDS else "DataError"
        write_atomic(path, json.dumps({"kind": kind, "message": str(error)}))
        raise


def first_error(folder: str) -> RushError | None:
    """The error of the first unit that had one."""
    for path in sorted(Path(folder).glob("*.json")):
        content = json.loads(path.read_bytes())
        return KINDS[content["kind"]](content["message"])
    return None


class Guard(PipelineStep):  # type: ignore[misc]
    """Stands before the last block of a pass, so that all errors of the blocks before it come by."""

    name = "errors"
    type = "rush guard"

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def run(
        self, data: Iterable[Document] | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Document]:
        with noting_errors(self.folder, rank):
            yield from data or ()
