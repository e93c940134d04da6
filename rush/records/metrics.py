"""One JSON line per step, appended as training goes.

Rows are written unbuffered, a whole line at a time, so that a killed process loses at most the line
it was writing; a row counts from the moment its newline is there. Forcing every row to the disk would
cost more than a small step, so that happens once per checkpoint (`sync`, before the checkpoint is
sealed): after a power cut the rows up to the newest checkpoint are there, and the later ones are
cut off by `truncate_after` and written again by the resumed run. NaN and infinity are written as
null, with their true names beside them under `not_finite`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rush.errors import DataError
from rush.files import json_safe, write_atomic, writing

Row = dict[str, Any]


class MetricsWriter:
    """Appends rows with a rising `step`; `one_per_step=False` allows several rows for one step (samples)."""

    def __init__(self, path: Path, *, one_per_step: bool = True) -> None:
        self.path = path
        self.one_per_step = one_per_step
        self._last_step = -1
        for row in read_rows(path):
            self._last_step = row["step"]
        with writing(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            # A line without its newline was cut by a crash; the next row must not be glued to it.
            os.ftruncate(self._descriptor, _complete_bytes(path))

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row. On a full disk the file keeps its whole rows and the caller gets a MachineError."""
        step = row["step"]
        assert type(step) is int, f"step must be an int, got {step!r}"
        assert step > self._last_step or (step == self._last_step and not self.one_per_step), (
            f"step {step} written after step {self._last_step}"
        )
        clean, lost = json_safe(dict(row))
        if lost:
            clean["not_finite"] = lost
        line = (json.dumps(clean, allow_nan=False, ensure_ascii=False) + "\n").encode()
        before = os.fstat(self._descriptor).st_size
        with writing(self.path):
            try:
                written = 0
                while written < len(line):
                    written += os.write(self._descriptor, line[written:])
            except OSError:
                os.ftruncate(self._descriptor, before)
                raise
        self._last_step = step

    def sync(self) -> None:
        """Force the rows to the disk; call it before sealing a checkpoint of the last step written."""
        with writing(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file, in order; an unfinished last line is left out, a broken one is a DataError."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            yield _parse(path, number, line)


def truncate_after(path: Path, step: int) -> int:
    """Cut away every row after `step` (atomically) and return how many rows stay.

    Rows stand in the order of their steps, so the first later one ends what is kept; nothing behind it is
    looked at. Lines behind the row of `step` may be broken by a power cut: they are to be cut anyway.
    """
    if not path.exists():
        return 0
    kept: list[bytes] = []
    last_step = -1
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                row = _parse(path, number, line)
            except DataError:
                if last_step == step:
                    break
                raise
            if row["step"] > step:
                break
            kept.append(line)
            last_step = row["step"]
    content = b"".join(kept)
    if len(content) != path.stat().st_size:
        write_atomic(path, content)
    return len(kept)


def _parse(path: Path, number: int, line: bytes) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(
            f"{path}, line {number} is not JSON ({error}). Remove the line or the file."
        ) from None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise DataError(
            f'{path}, line {number} is not a row with a whole-number "step". Remove the line or the file.'
        )
    return row


def _complete_bytes(path: Path) -> int:
    """Length of the file up to and including its last newline."""
    content = path.read_bytes()
    return content.rfind(b"\n") + 1
