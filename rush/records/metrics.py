"""One JSON line per step, appended as training goes.

Rows are written unbuffered, one line at a time, so that a killed process loses at most the line it was
writing; a row counts once its newline is written. An fsync per row would cost more than a small step, so that
happens once per checkpoint (`sync`, before the checkpoint is sealed): after a power cut the rows up to the
newest checkpoint are intact, and `truncate_after` removes the later ones, which the resumed run writes again.
NaN and infinity are written as null, with their names under `not_finite`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from pydantic import SkipValidation, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from rush.errors import DataError
from rush.files import json_safe, open_file, parse_json, write_atomic, writing
from rush.records.typed import wrong_field

LONGEST_ROW = 1 << 24
T = TypeVar("T", bound="StepRow")


class StepRow(TypedDict):
    """A row of any kind, with the step after which it was written."""

    step: int


class MetricsRow(StepRow, total=False):
    """A row of `metrics.jsonl`; the figures of an objective, as `accuracy` and `val_accuracy`, are further keys."""

    loss: SkipValidation[float]
    grad_norm: SkipValidation[float]
    lr: float
    tokens: int
    """Tokens of the run so far."""
    labels: int
    epoch: float
    """Passes over the training data so far."""
    padding: float
    """Fraction of the tokens; missing without padding, as `trained_per_s` is where every token is a label."""
    trained_per_s: float
    tokens_per_s: float
    step_s: float
    data_s: float
    memory_bytes: int
    mfu: float
    ceiling_fraction: float
    """In place of `mfu` where no datasheet is known: the fraction of the measured matmul rate."""
    skipped: bool
    """The scaled gradients overflowed, and nothing was updated."""
    val_loss: SkipValidation[float]
    val_rows: int
    """Rows per forward pass of the validation, where fewer than in training."""
    not_finite: dict[str, str]


class SampleRow(StepRow, total=False):
    """A row of `samples.jsonl`."""

    prompt: str
    text: str | None
    why: str
    """Why the sample is shorter than asked for, or missing."""


class SaveRow(StepRow, total=False):
    """A row of `saves.jsonl`: a finished save."""

    save_s: float
    """From its start to the committed checkpoint."""
    blocked_s: float
    """The part of that during which training waited."""
    waited_s: float
    """How long it waited for the save before it."""
    num_bytes: int
    """Written by this rank."""
    in_background: bool


SCHEMAS: Mapping[type, TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (StepRow, MetricsRow, SampleRow, SaveRow)
}


def add_figures(row: MetricsRow, figures: Mapping[str, float], prefix: str = "") -> None:
    """Add the objective's figures."""
    cast(dict[str, float], row).update({f"{prefix}{name}": value for name, value in figures.items()})


class RowWriter(Generic[T]):
    """Appends rows of one kind with a rising `step`."""

    def __init__(self, path: Path, kind: type[T]) -> None:
        self.path = path
        self._last_step = -1
        for row in read_rows(path, kind):
            self._last_step = row["step"]
        with writing(path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            # A line without its newline was cut by a crash; the next row must not be glued to it.
            os.ftruncate(self._descriptor, path.read_bytes().rfind(b"\n") + 1)

    def write(self, row: T) -> None:
        """Append one row. On a full disk the file keeps its whole rows and the caller gets a MachineError."""
        step = row["step"]
        assert step > self._last_step, f"step {step} written after step {self._last_step}"
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
        """fsync the rows; call it before sealing a checkpoint of the last step written."""
        with writing(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> RowWriter[T]:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_rows(path: Path, kind: type[T]) -> Iterator[T]:
    """The rows of a file, in order; an unfinished last line is left out, a broken one is a DataError."""
    if not path.exists():
        return
    for number, line in _lines(path):
        if not line.endswith(b"\n"):
            return
        yield _parse(path, number, line, kind)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with open_file(path) as file:
        for number in count(1):
            if not (line := file.readline(LONGEST_ROW)):
                return
            if len(line) == LONGEST_ROW:
                raise DataError(
                    f"{path}:{number}: the row is longer than {LONGEST_ROW:,} bytes, and a run's has some hundred. "
                    "The file is damaged; remove this line and what is behind it."
                )
            yield number, line


def truncate_after(path: Path, step: int) -> int:
    """Cut away every row after `step` (atomically) and return how many rows stay.

    Rows are in the order of their steps, so truncation starts at the first later one without reading further.
    Lines after the row of `step` may be broken by a power cut; they are removed anyway.
    """
    if not path.exists():
        return 0
    kept: list[bytes] = []
    last_step = -1
    for number, line in _lines(path):
        if not line.endswith(b"\n"):
            break
        try:
            row = _parse(path, number, line, StepRow)
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


def _parse(path: Path, number: int, line: bytes, kind: type[T]) -> T:
    """The row as it was written, with keys of later versions."""
    try:
        row: T = parse_json(line)
        SCHEMAS[kind].validate_python(row, strict=True)
    except ValidationError as error:
        problem = f"is not a row ({wrong_field(error)})"
    except ValueError as error:
        problem = f"is not JSON ({error})"
    else:
        return row
    raise DataError(f"{path}, line {number} {problem}. Remove the line or the file.")
