"""Read documents from text, JSONL, JSON, CSV and Parquet files, in slices that can be read independently.

Files are divided into slices by their sizes alone, so that many processes or machines can each read some. JSONL is split at
line ends, Parquet between row groups. A text file is one document; a large one is split at blank lines into documents of about
64 KiB, which can be divided among workers and between training and validation. Compressed JSONL and CSV (a quoted cell may
have line ends) cannot be read from the middle, nor can a JSON file, which is one list of rows: such a file is one slice. A byte-order mark is not part of the text.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import importlib
import io
import json
import os
import sys
import tokenize
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, AnyStr

from rush.errors import DataError, MachineError
from rush.files import open_file

TEXT_DOCUMENT_BYTES = 64 * 1024
TEXT_WHOLE_BYTES = 4 * TEXT_DOCUMENT_BYTES
LONGEST_LINE = 256 << 20
DECOMPRESSED_BYTES, DECOMPRESSED_TIMES = 256 << 20, 1000
BYTE_ORDER_MARK = codecs.BOM_UTF8
LARGEST_LIST = 1 << 30
ROW_ENDINGS = ".jsonl, .csv, .tsv (each also with .gz or .zst), .json (a list of objects), .parquet"
"""Files that hold rows."""
_COMPRESSIONS = ("", ".gz", ".zst")


@dataclass(frozen=True)
class Document:
    text: str
    id: str  # file and line, row or part


@dataclass(frozen=True)
class Slice:
    """A part of one file: bytes of text, JSONL and CSV, row groups of Parquet; a shard of a hub stream."""

    kind: str  # text, python, jsonl, packed (compressed jsonl), json (one list), csv (plain or compressed), parquet, hub
    path: str
    start: int
    stop: int
    first: int = 0  # number of the first part, line or row, for names and messages
    take: int | None = None  # read only this many documents


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Import an optional dependency; MachineError names the extra that installs it."""
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
    if name.endswith(tuple(table + end for table in (".csv", ".tsv") for end in _COMPRESSIONS)):
        return "csv"
    if name.endswith(".parquet"):
        return "parquet"
    if name.endswith(".json"):
        return "json"
    if name.endswith((".gz", ".zst", ".zip", ".bz2", ".xz", ".tar", ".arrow")):
        raise DataError(
            f"{path}: this format is not read. Allowed: {ROW_ENDINGS} (JSONL has one object per line), "
            "and plain text under any other name."
        )
    return "text"


@contextlib.contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    try:
        with open_file(path) as file:
            yield file
    except OSError as error:
        raise DataError(
            f"Cannot read {path}: {error.strerror or error}. Check that the file exists and is readable."
        ) from error


def slice_file(path: Path, slice_bytes: int) -> list[Slice]:
    """The slices of a file, of about `slice_bytes` each."""
    kind = file_kind(path)
    with opened(str(path)) as file:
        size = file.seek(0, 2)
        if size == 0:
            return []
        if kind == "jsonl":
            return list(_slice_jsonl(file, str(path), size, slice_bytes))
        if kind == "text":
            return list(_slice_text(file, str(path), size, slice_bytes))
    if kind == "parquet":
        return list(_slice_parquet(str(path), slice_bytes))
    return [Slice(kind, str(path), 0, size, first=1)]


def _slice_jsonl(file: IO[bytes], path: str, size: int, slice_bytes: int) -> Iterator[Slice]:
    start, line = 0, 1
    file.seek(0)
    while start < size:
        body = file.read(slice_bytes)
        rest = file.readline(LONGEST_LINE + 1)
        _check_line(path, rest)
        stop = start + len(body) + len(rest)
        yield Slice("jsonl", path, start, stop, first=line)
        line += body.count(b"\n") + rest.count(b"\n")
        start = stop


def _slice_text(file: IO[bytes], path: str, size: int, slice_bytes: int) -> Iterator[Slice]:
    start, part = 0, 0
    for number, stop in enumerate(_text_ends(file, 0, size, size), start=1):
        if stop - start >= slice_bytes or stop == size:
            yield Slice("text", path, start, stop, first=part)
            start, part = stop, number


def _text_ends(file: IO[bytes], start: int, stop: int, size: int) -> Iterator[int]:
    """The ends of the documents from `start` to `stop`: the same for any document that `start` is at."""
    while start < stop:
        end = size if size <= TEXT_WHOLE_BYTES else min(start + TEXT_DOCUMENT_BYTES, size)
        if end < size:
            file.seek(end)
            end += _break_after(file.read(TEXT_DOCUMENT_BYTES))
        yield end
        start = end


def _break_after(window: bytes) -> int:
    """Where to split `window`: after a blank line, else a line end, else before its last character."""
    for mark in (b"\n\n", b"\n"):
        found = window.find(mark)
        if found >= 0:
            return found + len(mark)
    cut = len(window) - 1
    while cut > 0 and (window[cut] & 0xC0) == 0x80:
        cut -= 1
    return cut or len(window)


def _slice_parquet(path: str, slice_bytes: int) -> Iterator[Slice]:
    with damaged_parquet(path):
        metadata = open_parquet(path).metadata
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    start, row, first, held = 0, 0, 0, 0
    for group, found in enumerate(groups):
        held += found.total_byte_size
        row += found.num_rows
        if held >= slice_bytes or group == len(groups) - 1:
            yield Slice("parquet", path, start, group + 1, first=first)
            start, first, held = group + 1, row, 0


def read_slice(piece: Slice, text_field: str) -> Iterator[Document]:
    """The documents of a slice, in order, without empty ones."""
    readers = {
        "text": _read_text,
        "python": _read_python,
        "jsonl": _read_rows,
        "packed": _read_rows,
        "json": _read_rows,
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
    """The rows of a slice of JSONL, JSON, CSV or Parquet with their names; of Parquet only these `columns`, if given."""
    if piece.kind == "parquet":
        for number, batch in read_batches(piece, columns):
            for offset, row in enumerate(batch_rows(batch, piece.path)):
                yield f"{piece.path}:row {number + offset}", row
    elif piece.kind == "csv":
        yield from _csv_rows(piece)
    elif piece.kind == "json":
        yield from _listed_rows(piece.path)
    else:
        for number, line in read_lines(piece):
            yield parse_line(line, piece.path, number)


def _read_rows(piece: Slice, text_field: str) -> Iterator[Document]:
    if piece.kind == "parquet":
        with damaged_parquet(piece.path):
            names = open_parquet(piece.path).schema_arrow.names
        if text_field not in names:
            raise DataError(missing_field(piece.path, text_field, names))
    for name, row in read_rows(piece, [text_field]):
        if text_field not in row:
            raise DataError(missing_field(name, text_field, list(row)))
        yield from as_document(row[text_field], name)


def read_lines(piece: Slice) -> Iterator[tuple[int, bytes]]:
    """The lines of a slice of JSONL, compressed or not, with their numbers; without blank lines and byte-order marks."""
    with opened(piece.path) if piece.kind == "jsonl" else decompressed(piece.path) as file:
        at = piece.start
        if at:
            file.seek(at)
        for number, line in enumerate(_lines(file, piece.path), start=piece.first):
            if piece.kind == "jsonl" and at >= piece.stop:
                return
            at += len(line)
            content = line.removeprefix(BYTE_ORDER_MARK).rstrip(b"\r\n")
            if content.strip():
                yield number, content


def _check_decompressed(path: str, num_bytes: int) -> None:
    """Refuse a file that decompresses to a thousand times its size: half a kilobyte can expand to terabytes of one letter."""
    if num_bytes > DECOMPRESSED_BYTES and num_bytes > DECOMPRESSED_TIMES * os.path.getsize(path):
        raise DataError(
            f"{path} decompresses to more than {num_bytes >> 20:,} MiB, over {DECOMPRESSED_TIMES:,} times its {os.path.getsize(path):,} bytes. "
            "Decompress it yourself if that is meant."
        )


def _lines(file: IO[AnyStr], path: str) -> Iterator[AnyStr]:
    """The lines of a file; one without an end (a compressed gigabyte of zeros) is refused."""
    read = 0
    while line := file.readline(LONGEST_LINE + 1):
        read += len(line)
        _check_decompressed(path, read)
        _check_line(path, line)
        yield line


def read_batches(piece: Slice, columns: list[str] | None = None) -> Iterator[tuple[int, Any]]:
    """The Arrow batches of a slice of Parquet, each with the number of its first row."""
    number, groups = piece.first, list(range(piece.start, piece.stop))
    with open_parquet(piece.path) as file:
        batches = file.iter_batches(batch_size=256, row_groups=groups, columns=columns)
        decompressed_bytes = 0
        while (batch := _next_batch(batches, piece.path)) is not None:
            decompressed_bytes += _decompressed_bytes(batch)
            _check_decompressed(piece.path, decompressed_bytes)
            yield number, batch
            number += batch.num_rows


def _decompressed_bytes(batch: Any) -> int:
    """The bytes of a batch with every text written out: a dictionary holds one for many rows."""
    compute = importlib.import_module("pyarrow.compute")
    total = 0
    for column in batch.columns:
        if hasattr(column, "dictionary") and "string" in str(column.type.value_type):
            total += (
                compute.sum(compute.take(compute.binary_length(column.dictionary), column.indices)).as_py()
                or 0
            )
        else:
            total += column.nbytes
    return int(total)


def _next_batch(batches: Iterator[Any], path: str) -> Any:
    with damaged_parquet(path):
        return next(batches, None)


def batch_rows(batch: Any, path: str) -> list[dict[str, Any]]:
    """The rows of an Arrow batch."""
    with damaged_parquet(path):
        rows: list[dict[str, Any]] = batch.to_pylist()
        return rows


@contextlib.contextmanager
def damaged_parquet(path: str) -> Iterator[None]:
    """The exceptions that pyarrow raises for damaged pages: its own, those of codecs and of invalid values."""
    arrow = import_extra("pyarrow", "parquet", "Reading Parquet files")
    try:
        yield
    except (arrow.ArrowException, OSError, ValueError, OverflowError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{path}: the Parquet file is damaged ({why}). Fetch it again.") from error


@contextlib.contextmanager
def decompressed(path: str) -> Iterator[io.BufferedReader]:
    """The bytes of a file, decompressed by its extension."""
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
            raise DataError(f"{name}: {ragged(header, cells)}. Fix or remove the row.")
        yield name, dict(zip(header, cells, strict=True))


def csv_records(path: str) -> Iterator[tuple[int, list[str], list[str]]]:
    """For each record of a CSV or TSV file: its first line, the columns (named by the first record), and its cells."""
    csv.field_size_limit(LONGEST_LINE)
    name = path.lower().removesuffix(".gz").removesuffix(".zst")
    delimiter = "\t" if name.endswith(".tsv") else ","
    with decompressed(path) as stream, io.TextIOWrapper(stream, encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(_lines(file, path), delimiter=delimiter, strict=True)
        try:
            header = next(reader, [])
            if len(set(header)) != len(header):
                raise DataError(f"{path}:1: a column name occurs twice; each must be unique.")
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


def _check_line(path: str, line: bytes | str) -> None:
    if len(line) > LONGEST_LINE:
        raise DataError(f"{path}: a line is longer than {LONGEST_LINE >> 20} MiB, the longest that is read.")


def ragged(header: list[str], cells: list[str]) -> str:
    return f"{len(cells)} cells under {len(header)} columns"


class BadLine(DataError):
    """A line that is no row; `problem` is the message without the name of the line."""

    problem: str

    @classmethod
    def at(cls, name: str, problem: str) -> BadLine:
        bad = cls(f"{name}: {problem}")
        bad.problem = problem
        return bad


def parse_line(line: bytes, path: str, number: int) -> tuple[str, dict[str, Any]]:
    """The row of a line of JSONL, with its name."""
    name = f"{path}:{number}"
    text = _decode(line, name)
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadLine.at(
            name, f"{json_problem(error)}. Each line must be one JSON object; fix or remove the line."
        ) from error
    if not isinstance(row, dict):
        raise BadLine.at(name, f"expected a JSON object, found {type(row).__name__}.")
    return name, row


def _listed_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a JSON file: one list of objects, or an object that holds one such list."""
    if (size := os.path.getsize(path)) > LARGEST_LIST:
        raise DataError(
            f"{path}: {size >> 20:,} MiB of one JSON list, which is read at once; allowed: {LARGEST_LIST >> 20:,} MiB. Write it as "
            "JSONL, one object per line."
        )
    with opened(path) as file:
        text = _decode(file.read().removeprefix(BYTE_ORDER_MARK), path)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        lines = " If it has one object per line, name it .jsonl." if text.lstrip().startswith("{") else ""
        raise DataError(f"{path}: {json_problem(error)}.{lines}") from error
    if isinstance(found, dict):
        lists = [value for value in found.values() if isinstance(value, list)]
        found = lists[0] if len(lists) == 1 else found
    if not isinstance(found, list):
        raise DataError(f"{path}: expected a list of JSON objects, found {type(found).__name__}.")
    for number, row in enumerate(found):
        name = f"{path}:row {number}"
        if not isinstance(row, dict):
            raise DataError(f"{name}: expected a JSON object, found {type(row).__name__}.")
        yield name, row


def json_problem(error: Exception) -> str:
    """Why a line is not valid JSON."""
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON ({error.msg} at column {error.colno})"
    if isinstance(error, RecursionError):
        return "not readable as JSON (lists or objects are nested too deeply)"
    return f"not readable as JSON (a number of more than {sys.get_int_max_str_digits():,} digits)"


def open_parquet(path: str) -> Any:
    arrow = import_extra("pyarrow", "parquet", "Reading Parquet files")
    parquet = import_extra("pyarrow.parquet", "parquet", "Reading Parquet files")
    try:
        return parquet.ParquetFile(path)
    except (arrow.ArrowException, OSError, ValueError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise DataError(f"{path}: not a readable Parquet file ({why}).") from error


def missing_field(name: str, text_field: str, found: list[str]) -> str:
    return (
        f"{name}: no field {text_field!r}. Fields found: {', '.join(sorted(found)) or 'none'}. "
        "Set data.text_field to the one that holds the text."
    )


def as_document(text: object, name: str) -> Iterator[Document]:
    """The document, validated; nothing where the text is empty."""
    if not isinstance(text, str):
        raise DataError(f"{name}: the text is {type(text).__name__}, expected a string.")
    if not text:
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{name}: the text holds half of a surrogate pair at character {error.start}, "
            "which no encoding can write. Fix or remove the document."
        ) from error
    yield Document(text, name)


def _decode(raw: bytes, name: str, at: int = 0) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLine.at(
            name,
            f"not UTF-8 text (byte 0x{raw[error.start]:02x} at position {at + error.start}). "
            "Convert the file to UTF-8, for example with iconv.",
        ) from error
