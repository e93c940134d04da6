"""Read rows of JSONL, CSV (both also .gz, .zst) and Parquet so that they can be written back unchanged.

Files are divided into units as for corpus preparation, by their sizes alone; a unit is one worker's task. A row keeps its
original line, or its position in an Arrow batch. Rows that an earlier pass removed are not parsed.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rush.data.readers import (
    ROW_ENDINGS,
    Slice,
    batch_rows,
    csv_records,
    file_kind,
    json_problem,
    ragged,
    read_batches,
    read_lines,
    slice_file,
)
from rush.data.sources import MAX_UNIT_BYTES, UNITS_WANTED, grouped
from rush.errors import DataError
from rush.files import write_atomic

MIN_UNIT_BYTES = 8 << 20  # datatrove takes some 30 ms to start a task, in each of several passes


@dataclass(slots=True)
class FileRow:
    """A row of a unit. `place` is its slice in the unit, and its line (or row) there."""

    index: int
    place: tuple[int, int]
    name: str
    values: dict[str, Any]
    line: bytes | None = None
    batch: Any = None
    offset: int = 0
    edited: bool = False
    """Whether a stage changed the values: the line or the batch no longer hold them."""


@dataclass(slots=True)
class Unreadable:
    index: int
    name: str
    reason: str
    text: str


@dataclass(frozen=True)
class Inputs:
    """The files to clean, divided into units."""

    paths: tuple[str, ...]
    units: tuple[tuple[Slice, ...], ...]

    @property
    def labels(self) -> dict[str, str]:
        """Short names for messages: paths relative to the common folder."""
        shared = os.path.commonpath([os.path.dirname(path) for path in self.paths])
        return {path: os.path.relpath(path, shared) for path in self.paths}

    def describe(self) -> list[dict[str, Any]]:
        stats = [(path, os.stat(path)) for path in self.paths]
        return [{"path": path, "bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns} for path, stat in stats]

    @property
    def num_bytes(self) -> int:
        return sum(os.path.getsize(path) for path in self.paths)

    @property
    def parquet(self) -> bool:
        return all(path.lower().endswith(".parquet") for path in self.paths)

    def save(self, folder: Path) -> str:
        """Save as a file named by its hash: tasks refer to it instead of each holding all units."""
        content = json.dumps(
            {"paths": self.paths, "units": [[asdict(piece) for piece in unit] for unit in self.units]}
        )
        path = folder / f"inputs-{hashlib.sha256(content.encode()).hexdigest()[:16]}.json"
        write_atomic(path, content)
        return str(path)


@functools.lru_cache(maxsize=2)
def load_inputs(path: str) -> Inputs:
    content = json.loads(Path(path).read_bytes())
    units = tuple(tuple(Slice(**piece) for piece in unit) for unit in content["units"])
    return Inputs(tuple(content["paths"]), units)


def find_inputs(patterns: Sequence[str]) -> Inputs:
    """The files that paths and globs name, divided into units; DataError for files that have no rows."""
    found: dict[str, None] = {}
    for pattern in patterns:
        if os.path.isdir(pattern):
            raise DataError(f"{pattern} is a folder; write its files, as in '{pattern.rstrip('/')}/*.jsonl'.")
        literal = os.path.expanduser(pattern)
        matches = [literal] if os.path.isfile(literal) else sorted(glob.glob(literal, recursive=True))
        if not matches:
            raise DataError(f"No file matches {pattern!r} (from {os.getcwd()}).")
        found.update((os.path.abspath(match), None) for match in matches if not os.path.isdir(match))
    paths = tuple(found)
    for path in paths:
        if not os.access(path, os.R_OK):
            raise DataError(f"{path} may not be read by this user; change its permissions.")
    total = sum(os.path.getsize(path) for path in paths)
    unit_bytes = min(max(total // UNITS_WANTED, MIN_UNIT_BYTES), MAX_UNIT_BYTES)
    slices = [piece for path in paths for piece in _slices(path, unit_bytes)]
    if not slices:
        raise DataError(f"There is nothing to clean: {len(paths)} file(s) with {total} bytes hold no row.")
    return Inputs(paths, tuple(tuple(group) for group in grouped(slices, unit_bytes)))


def _slices(path: str, unit_bytes: int) -> list[Slice]:
    if file_kind(Path(path)) == "text":
        raise DataError(f"{path}: rows are read from {ROW_ENDINGS}; found another ending.")
    if file_kind(Path(path)) == "json":
        raise DataError(
            f"{path}: cleaning reads rows one by one; write the list as JSONL, one object per line."
        )
    return slice_file(Path(path), unit_bytes)


def read_rows(
    unit: Sequence[Slice], labels: dict[str, str], removed: npt.NDArray[np.bool_] | None = None
) -> Iterator[FileRow | Unreadable]:
    """The rows of a unit in order, without those marked in `removed` (by index)."""
    index = 0
    marks = removed if removed is not None else np.empty(0, dtype=np.bool_)
    readers: dict[str, Callable[[Slice], Iterator[tuple[int, Any]]]] = {
        "jsonl": read_lines,
        "packed": read_lines,
        "csv": _cells,
        "parquet": _arrow_rows,
    }
    for number, piece in enumerate(unit):
        for at, raw in readers[piece.kind](piece):
            if index >= len(marks) or not marks[index]:
                yield _row(piece.kind, raw, index, (number, at), place_name(piece, labels, at))
            index += 1


def place_name(piece: Slice, labels: dict[str, str], at: int) -> str:
    """A row's name in messages: `recipes.jsonl:17`, or `recipes.parquet:row 17` (from 0)."""
    return f"{labels[piece.path]}:{'row ' if piece.kind == 'parquet' else ''}{at}"


def _row(kind: str, raw: Any, index: int, place: tuple[int, int], name: str) -> FileRow | Unreadable:
    if kind == "parquet":
        batch, offset, values = raw
        return FileRow(index, place, name, values, batch=batch, offset=offset)
    if kind == "csv":
        header, cells = raw
        if len(cells) != len(header):
            return Unreadable(index, name, ragged(header, cells), " | ".join(cells))
        return FileRow(index, place, name, dict(zip(header, cells, strict=True)))
    try:
        values = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return _unreadable(index, name, f"not UTF-8 text (byte 0x{raw[error.start]:02x})", raw)
    except (ValueError, RecursionError) as error:
        return _unreadable(index, name, json_problem(error), raw)
    if not isinstance(values, dict):
        return _unreadable(index, name, f"expected a JSON object, found {type(values).__name__}", raw)
    if b"\\ud" in raw or b"\\uD" in raw:
        try:
            json.dumps(values, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return _unreadable(index, name, "half of a surrogate pair, which no encoding can write", raw)
    return FileRow(index, place, name, values, line=raw)


def _unreadable(index: int, name: str, reason: str, raw: bytes) -> Unreadable:
    return Unreadable(index, name, reason, raw[:2000].decode("utf-8", errors="replace"))


def _cells(piece: Slice) -> Iterator[tuple[int, tuple[list[str], list[str]]]]:
    return ((at, (header, cells)) for at, header, cells in csv_records(piece.path))


def _arrow_rows(piece: Slice) -> Iterator[tuple[int, tuple[Any, int, dict[str, Any]]]]:
    for first, batch in read_batches(piece):
        for offset, values in enumerate(batch_rows(batch, piece.path)):
            yield first + offset, (batch, offset, values)
