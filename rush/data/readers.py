"""Documents out of files: text, JSONL, CSV and Parquet, in slices that can be read independently.

A corpus is cut into slices before anything is read in earnest, so that many processes (or many
machines) can each take some, and so that the cut depends on the files alone. JSONL is cut after a line
end, Parquet between row groups. A text file is one document; a large one is cut at blank lines into
documents of about 64 KiB, or else one big file could be neither shared out nor split into training
and validation. Neither compressed JSONL nor CSV (a quoted cell may hold line ends) can be entered in the middle: such
a file is one slice. A byte-order mark, as editors on Windows write it, is no part of the text.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import importlib
import io
import json
import sys
import tokenize
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from rush.errors import DataError, MachineError

TEXT_DOCUMENT_BYTES = 64 * 1024
TEXT_WHOLE_BYTES = 4 * TEXT_DOCUMENT_BYTES
BYTE_ORDER_MARK = codecs.BOM_UTF8
ROW_ENDINGS = ".jsonl, .csv, .tsv (each also with .gz or .zst), .parquet"
"""Files that hold rows."""
_PACKINGS = ("", ".gz", ".zst")


@dataclass(frozen=True)
class Document:
    text: str
    id: str  # file and line, row or part


@dataclass(frozen=True)
class Slice:
    """A part of one file: bytes of text, JSONL and CSV, row groups of Parquet; a shard of a hub stream."""

    kind: str  # text, python, jsonl, packed (compressed jsonl), csv (plain or compressed), parquet, hub
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
            f'Run: pip install "optimization-rush[{extra}]"'
        ) from error


def file_kind(path: Path) -> str:
    """The format, from the file's name."""
    name = path.name.lower()
    if name.endswith((".jsonl", ".ndjson")):
        return "jsonl"
    if name.endswith((".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst")):
        return "packed"
    if name.endswith(tuple(table + packing for table in (".csv", ".tsv") for packing in _PACKINGS)):
        return "csv"
    if name.endswith(".parquet"):
        return "parquet"
    if name.endswith((".json", ".gz", ".zst", ".zip", ".bz2", ".xz", ".tar", ".arrow")):
        raise DataError(
            f"{path}: this format is not read. Allowed: {ROW_ENDINGS} (JSONL has one object per line), "
            "and plain text under any other name."
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
        "csv": _read_rows,
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
            text = _decode(file.read(stop - start), name, at=start)
            yield from as_document(text if start else text.removeprefix("\ufeff"), name)
            start = stop


def _read_python(piece: Slice, _: str) -> Iterator[Document]:
    """A source file declares its own encoding in its first lines."""
    with opened(piece.path) as file:
        encoding, _lines_read = tokenize.detect_encoding(file.readline)
        file.seek(0)
        yield from as_document(file.read().decode(encoding), piece.path)


def read_rows(piece: Slice, columns: list[str] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a slice of JSONL, CSV or Parquet with their names; of Parquet, only `columns` where given."""
    if piece.kind == "parquet":
        return _parquet_rows(piece, columns)
    if piece.kind == "csv":
        return _csv_rows(piece)
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
    with unpacked(piece.path) as stream:
        for line_number, line in enumerate(stream, start=1):
            yield from _parse_line(line, piece.path, line_number)


@contextlib.contextmanager
def unpacked(path: str) -> Iterator[io.BufferedReader]:
    """The bytes of a file that may be compressed, by its name."""
    name = path.lower()
    try:
        if name.endswith(".zst"):
            arrow = import_extra("pyarrow", "parquet", "Reading .zst files")
            raw = arrow.input_stream(path, compression="zstd")
        else:
            raw = (gzip.open if name.endswith(".gz") else open)(path, "rb")
        with io.BufferedReader(raw, 1 << 20) as stream:
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        if not name.endswith((".gz", ".zst")):
            raise DataError(f"Cannot read {path}: {error}.") from error
        raise DataError(f"{path}: the compressed file is damaged ({error}). Fetch it again.") from error


def _csv_rows(piece: Slice) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, header, cells in csv_records(piece.path):
        name = f"{piece.path}:{number}"
        if len(cells) != len(header):
            raise DataError(f"{name}: {ragged(header, cells)}. Mend or remove the row.")
        yield name, dict(zip(header, cells, strict=True))


def csv_records(path: str) -> Iterator[tuple[int, list[str], list[str]]]:
    """The line each record of a CSV or TSV file begins at, the columns (named by the first record), and its cells."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    name = path.lower().removesuffix(".gz").removesuffix(".zst")
    delimiter = "\t" if name.endswith(".tsv") else ","
    with unpacked(path) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
            if len(set(header)) != len(header):
                raise DataError(f"{path}:1: a column's name stands twice; each needs its own.")
            at = reader.line_num + 1
            for cells in reader:
                if cells:
                    yield at, header, cells
                at = reader.line_num + 1
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path}: not UTF-8 text ({error.reason}). Convert it, for example with iconv."
            ) from None
        except csv.Error as error:
            raise DataError(f"{path}:{reader.line_num}: not valid CSV ({error}).") from None


def ragged(header: list[str], cells: list[str]) -> str:
    return f"{len(cells)} cells under {len(header)} columns"


def _parse_line(line: bytes, path: str, number: int) -> Iterator[tuple[str, dict[str, Any]]]:
    line = line.removeprefix(BYTE_ORDER_MARK)
    if not line.strip():
        return
    name = f"{path}:{number}"
    text = _decode(line, name)
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{name}: {why_no_json(error)}. Each line must be one JSON object; fix or remove the line."
        ) from error
    if not isinstance(row, dict):
        raise DataError(f"{name}: expected a JSON object, found {type(row).__name__}.")
    yield name, row


def why_no_json(error: Exception) -> str:
    """In words, why Python cannot read a line as JSON."""
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON ({error.msg} at column {error.colno})"
    if isinstance(error, RecursionError):
        return "not readable as JSON (lists or objects are nested too deeply)"
    return f"not readable as JSON (a number of more than {sys.get_int_max_str_digits():,} digits)"


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
