"""Documents out of files: text, JSONL and Parquet, in slices that can be read independently.

A corpus is cut into slices before anything is read in earnest, so that many processes (or many
machines) can each take some, and so that the cut depends on the files alone. JSONL is cut after a line
end, Parquet between row groups. A text file is one document; a large one is cut at blank lines into
documents of about 64 KiB, or else one big file could be neither shared out nor split into training
and validation. Compressed JSONL cannot be entered in the middle: such a file is one slice.
"""

from __future__ import annotations

import contextlib
import gzip
import importlib
import json
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from rush.errors import DataError, MachineError

TEXT_DOCUMENT_BYTES = 64 * 1024
TEXT_WHOLE_BYTES = 4 * TEXT_DOCUMENT_BYTES


@dataclass(frozen=True)
class Document:
    text: str
    id: str  # file and line, row or part


@dataclass(frozen=True)
class Slice:
    """A part of one file: bytes of text and JSONL, row groups of Parquet; a shard of a hub stream."""

    kind: str  # text, python, jsonl, packed (compressed jsonl), parquet, hub
    path: str
    start: int
    stop: int
    first: int = 0  # number of the first part, line or row, for names and messages
    take: int | None = None  # read only this many documents


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Import an optional dependency, or say which extra brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MachineError(
            f"{purpose} needs {module.split('.')[0]}, which is not installed. "
            f'Run: pip install "optimization-rush[{extra}]" -c constraints.txt'
        ) from error


def file_kind(path: Path) -> str:
    """The format, from the file's name."""
    name = path.name.lower()
    if name.endswith((".jsonl", ".ndjson")):
        return "jsonl"
    if name.endswith((".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst")):
        return "packed"
    if name.endswith(".parquet"):
        return "parquet"
    if name.endswith((".json", ".gz", ".zst", ".zip", ".bz2", ".xz", ".tar", ".arrow")):
        raise DataError(
            f"{path}: this format is not read. Allowed: .jsonl, .jsonl.gz, .jsonl.zst (one object per line), "
            ".parquet, and plain text under any other name."
        )
    return "text"


@contextlib.contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise DataError(
            f"Cannot read {path}: {error.strerror or error}. Check that the file exists and is readable."
        ) from error


def cut_file(path: Path, slice_bytes: int) -> list[Slice]:
    """Slices of about `slice_bytes` that together are the file."""
    kind = file_kind(path)
    with opened(str(path)) as file:
        size = file.seek(0, 2)
        if size == 0:
            return []
        if kind == "jsonl":
            return list(_cut_jsonl(file, str(path), size, slice_bytes))
        if kind == "text":
            return list(_cut_text(file, str(path), size, slice_bytes))
    if kind == "parquet":
        return list(_cut_parquet(str(path), slice_bytes))
    return [Slice(kind, str(path), 0, size, first=1)]


def _cut_jsonl(file: IO[bytes], path: str, size: int, slice_bytes: int) -> Iterator[Slice]:
    start, line = 0, 1
    file.seek(0)
    while start < size:
        body = file.read(slice_bytes)
        rest = file.readline()
        stop = start + len(body) + len(rest)
        yield Slice("jsonl", path, start, stop, first=line)
        line += body.count(b"\n") + rest.count(b"\n")
        start = stop


def _cut_text(file: IO[bytes], path: str, size: int, slice_bytes: int) -> Iterator[Slice]:
    start, part = 0, 0
    for number, stop in enumerate(_text_ends(file, 0, size, size), start=1):
        if stop - start >= slice_bytes or stop == size:
            yield Slice("text", path, start, stop, first=part)
            start, part = stop, number


def _text_ends(file: IO[bytes], start: int, stop: int, size: int) -> Iterator[int]:
    """Where documents from `start` to `stop` end: the same places, whichever document one starts at."""
    while start < stop:
        end = size if size <= TEXT_WHOLE_BYTES else min(start + TEXT_DOCUMENT_BYTES, size)
        if end < size:
            file.seek(end)
            end += _break_after(file.read(TEXT_DOCUMENT_BYTES))
        yield end
        start = end


def _break_after(window: bytes) -> int:
    """How far into `window` to cut: after a blank line, else a line end, else before its last character."""
    for mark in (b"\n\n", b"\n"):
        found = window.find(mark)
        if found >= 0:
            return found + len(mark)
    cut = len(window) - 1
    while cut > 0 and (window[cut] & 0xC0) == 0x80:
        cut -= 1
    return cut or len(window)


def _cut_parquet(path: str, slice_bytes: int) -> Iterator[Slice]:
    metadata = open_parquet(path).metadata
    start, row, first, held = 0, 0, 0, 0
    for group in range(metadata.num_row_groups):
        held += metadata.row_group(group).total_byte_size
        row += metadata.row_group(group).num_rows
        if held >= slice_bytes or group == metadata.num_row_groups - 1:
            yield Slice("parquet", path, start, group + 1, first=first)
            start, first, held = group + 1, row, 0


def read_slice(piece: Slice, text_field: str) -> Iterator[Document]:
    """The documents of a slice, in order; documents without any text are passed over."""
    readers = {
        "text": _read_text,
        "python": _read_python,
        "jsonl": _read_rows,
        "packed": _read_rows,
        "parquet": _read_rows,
    }
    documents = readers[piece.kind](replace(piece, take=None), text_field)
    for count, document in enumerate(documents):
        if piece.take is not None and count >= piece.take:
            return
        yield document


def _read_text(piece: Slice, _: str) -> Iterator[Document]:
    with opened(piece.path) as file:
        size = file.seek(0, 2)
        start = piece.start
        for part, stop in enumerate(_text_ends(file, piece.start, piece.stop, size), start=piece.first):
            file.seek(start)
            name = piece.path if size <= TEXT_WHOLE_BYTES else f"{piece.path}#{part}"
            yield from as_document(_decode(file.read(stop - start), name, at=start), name)
            start = stop


def _read_python(piece: Slice, _: str) -> Iterator[Document]:
    """A source file declares its own encoding in its first lines."""
    with opened(piece.path) as file:
        encoding, _lines_read = tokenize.detect_encoding(file.readline)
        file.seek(0)
        yield from as_document(file.read().decode(encoding), piece.path)


def read_rows(piece: Slice, columns: list[str] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a slice of JSONL or Parquet with their names; of Parquet, only `columns` where given."""
    if piece.kind == "parquet":
        return _parquet_rows(piece, columns)
    return _jsonl_rows(piece) if piece.kind == "jsonl" else _packed_rows(piece)


def _read_rows(piece: Slice, text_field: str) -> Iterator[Document]:
    if piece.kind == "parquet":
        names = open_parquet(piece.path).schema_arrow.names
        if text_field not in names:
            raise DataError(missing_field(piece.path, text_field, names))
    for name, row in read_rows(piece, [text_field]):
        if text_field not in row:
            raise DataError(missing_field(name, text_field, list(row)))
        yield from as_document(row[text_field], name)


def _jsonl_rows(piece: Slice) -> Iterator[tuple[str, dict[str, Any]]]:
    with opened(piece.path) as file:
        file.seek(piece.start)
        at = piece.start
        line_number = piece.first
        while at < piece.stop:
            line = file.readline()
            if not line:
                return
            yield from _parse_line(line, piece.path, line_number)
            at += len(line)
            line_number += 1


def _packed_rows(piece: Slice) -> Iterator[tuple[str, dict[str, Any]]]:
    if piece.path.lower().endswith(".zst"):
        arrow = import_extra("pyarrow", "parquet", "Reading .jsonl.zst files")
        stream = arrow.input_stream(piece.path, compression="zstd")
    else:
        stream = gzip.open(piece.path, "rb")  # noqa: SIM115 — entered just below
    with stream:
        try:
            for line_number, line in enumerate(_lines(stream), start=1):
                yield from _parse_line(line, piece.path, line_number)
        except (OSError, EOFError) as error:
            raise DataError(
                f"{piece.path}: the compressed file is damaged ({error}). Fetch it again."
            ) from error


def _lines(stream: Any) -> Iterator[bytes]:
    held = b""
    while block := stream.read(1 << 20):
        *whole, held = (held + block).split(b"\n")
        yield from whole
    if held:
        yield held


def _parse_line(line: bytes, path: str, number: int) -> Iterator[tuple[str, dict[str, Any]]]:
    if not line.strip():
        return
    name = f"{path}:{number}"
    try:
        row = json.loads(_decode(line, name))
    except json.JSONDecodeError as error:
        raise DataError(
            f"{name}: not valid JSON ({error.msg} at column {error.colno}). "
            "Each line must be one JSON object; mend or remove the line."
        ) from error
    if not isinstance(row, dict):
        raise DataError(f"{name}: expected a JSON object, found {type(row).__name__}.")
    yield name, row


def _parquet_rows(piece: Slice, columns: list[str] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    groups = list(range(piece.start, piece.stop))
    number = piece.first
    for batch in open_parquet(piece.path).iter_batches(batch_size=256, row_groups=groups, columns=columns):
        for row in batch.to_pylist():
            yield f"{piece.path}:row {number}", row
            number += 1


def open_parquet(path: str) -> Any:
    arrow = import_extra("pyarrow", "parquet", "Reading Parquet files")
    parquet = import_extra("pyarrow.parquet", "parquet", "Reading Parquet files")
    try:
        return parquet.ParquetFile(path)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file ({error}).") from error


def missing_field(name: str, text_field: str, found: list[str]) -> str:
    return (
        f"{name}: no field {text_field!r}. Fields found: {', '.join(sorted(found)) or 'none'}. "
        "Set data.text_field to the one that holds the text."
    )


def as_document(text: object, name: str) -> Iterator[Document]:
    """A checked document, or nothing where the text is empty."""
    if not isinstance(text, str):
        raise DataError(f"{name}: the text is {type(text).__name__}, expected a string.")
    if not text:
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name}: the text holds half of a surrogate pair at character {error.start}, "
            "which no encoding can write. Mend or remove the document."
        ) from error
    yield Document(text, name)


def _decode(raw: bytes, name: str, at: int = 0) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{name}: not UTF-8 text (byte 0x{raw[error.start]:02x} at position {at + error.start}). "
            "Convert the file to UTF-8, for example with iconv."
        ) from error
