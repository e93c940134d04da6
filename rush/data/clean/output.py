"""Write the kept rows unchanged: lines of JSONL, or rows of Parquet with their schema.

Every unit writes a part; the last step joins or names the parts in order and renames the result into place.
"""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from rush.data.clean.failure import recording_errors
from rush.data.clean.row_files import FileRow, Inputs
from rush.data.readers import import_extra, open_parquet
from rush.errors import DataError
from rush.files import json_safe, replacing

T = TypeVar("T")
CHUNK_ROWS = 4096
CHUNK_BYTES = 32 << 20


def input_schema(inputs: Inputs) -> Any:
    """The common schema of all Parquet inputs."""
    first = open_parquet(inputs.paths[0]).schema_arrow
    for path in inputs.paths[1:]:
        other = open_parquet(path).schema_arrow
        if not first.equals(other):
            raise DataError(
                f"{path} has other columns or types than {inputs.paths[0]} ({', '.join(other.names)}), so they do "
                "not fit in one Parquet output. Clean them one by one, or write a .jsonl file."
            )
    return first


class WriteKept(PipelineStep):  # type: ignore[misc]
    """Writes the kept rows of a unit as one part of the output."""

    name = "kept rows"
    type = "rush writer"

    def __init__(self, folder: str, arrow: bool, infer: bool, errors: str) -> None:
        super().__init__()
        self.folder = folder
        self.arrow = arrow
        self.infer = infer
        self.errors = errors

    def run(
        self, data: Iterable[Document] | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Document]:
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        rows = (document.metadata["row"] for document in data or ())
        with recording_errors(self.errors, rank):
            if self.arrow:
                with replacing(folder / f"{rank:05d}.parquet") as temporary:
                    kept = _write_batches(temporary, rows)
            else:
                with replacing(folder / f"{rank:05d}.jsonl") as temporary, open(temporary, "wb") as file:
                    kept = self._write_lines(file, rows, folder / f"{rank:05d}.schema")
        with replacing(folder / f"{rank:05d}.count") as temporary:
            temporary.write_text(str(kept))
        yield from ()

    def _write_lines(self, file: IO[bytes], rows: Iterable[FileRow], schema_path: Path) -> int:
        kept = 0
        schema: Any = None
        for chunk in _chunked(rows, _row_bytes()):
            for row in chunk:
                file.write((row.line if row.line is not None else as_line(row)) + b"\n")
            kept += len(chunk)
            if self.infer:
                schema = unified(
                    schema, schema_of([row.values for row in chunk], chunk[0].name), chunk[0].name
                )
        if schema is not None:
            with replacing(schema_path) as temporary:
                temporary.write_bytes(schema.serialize().to_pybytes())
        return kept


def _chunked(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Lists of at most `CHUNK_ROWS` items, or about `CHUNK_BYTES`."""
    chunk: list[T] = []
    held = 0
    for item in items:
        chunk.append(item)
        held += size_of(item)
        if len(chunk) >= CHUNK_ROWS or held >= CHUNK_BYTES:
            yield chunk
            chunk, held = [], 0
    if chunk:
        yield chunk


def _row_bytes() -> Callable[[FileRow], int]:
    """Bytes that a row holds in memory; an Arrow batch counts with its first row."""
    batch = None

    def size_of(row: FileRow) -> int:
        nonlocal batch
        new, batch = row.batch is not batch, row.batch
        return len(row.line or b"") + (batch.nbytes if new and batch is not None else 0)

    return size_of


def as_line(row: FileRow) -> bytes:
    """A row of CSV or Parquet as a line of JSON, with dates in ISO format, decimals as text, and no NaN."""

    def plain(value: object) -> str:
        if isinstance(value, datetime.date | datetime.time):
            return value.isoformat()
        if isinstance(value, decimal.Decimal):
            return str(value)
        raise DataError(
            f"{row.name}: a value is {type(value).__name__}, which JSON cannot hold; write a .parquet file."
        )

    values, _ = json_safe(row.values)
    return json.dumps(values, ensure_ascii=False, default=plain).encode()


def _write_batches(path: Path, rows: Iterable[FileRow]) -> int:
    """Rows of Parquet, taken from their Arrow batches, with types and order unchanged."""
    arrow = import_extra("pyarrow", "parquet", "Writing Parquet files")
    parquet = import_extra("pyarrow.parquet", "parquet", "Writing Parquet files")
    kept, writer = 0, None
    try:
        for chunk in _chunked(rows, _row_bytes()):
            tables = [_rows_of(arrow, rows) for rows in _by_batch(chunk)]
            table = arrow.Table.from_batches(tables)
            writer = writer or parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
            kept += len(chunk)
    finally:
        if writer is not None:
            writer.close()
        else:
            path.touch()
    return kept


def _rows_of(arrow: Any, rows: list[FileRow]) -> Any:
    """Rows of one batch: as they are in it, or, of one that was changed, from their values."""
    if rows[0].edited:
        schema = rows[0].batch.schema
        return arrow.RecordBatch.from_pylist([row.values for row in rows], schema=schema)
    return rows[0].batch.take(arrow.array([row.offset for row in rows]))


def _by_batch(rows: list[FileRow]) -> Iterator[list[FileRow]]:
    held = rows[:1]
    for row in rows[1:]:
        if row.batch is not held[-1].batch or row.edited != held[-1].edited:
            yield held
            held = []
        held.append(row)
    yield held


def schema_of(rows: list[dict[str, Any]], name: str) -> Any:
    """The Arrow schema of some rows: all keys, in order of appearance."""
    arrow = import_extra("pyarrow", "parquet", "Writing Parquet files")
    keys = dict.fromkeys(key for row in rows for key in row)
    fields = []
    for key in keys:
        try:
            fields.append(arrow.field(key, arrow.array([row.get(key) for row in rows]).type))
        except (arrow.ArrowException, OverflowError) as error:
            raise _mixed(key, name, error) from None
    return arrow.schema(fields)


def unified(first: Any, second: Any, name: str) -> Any:
    arrow = import_extra("pyarrow", "parquet", "Writing Parquet files")
    if first is None:
        return second
    try:
        return arrow.unify_schemas([first, second], promote_options="permissive")
    except arrow.ArrowException as error:
        raise _mixed(None, name, error) from None


def _mixed(key: str | None, name: str, error: Exception) -> DataError:
    what = f"the field {key!r}" if key else "a field"
    return DataError(
        f"Near {name}, {what} has more than one type ({str(error).splitlines()[0]}), which Parquet cannot hold; "
        "write a .jsonl file instead."
    )


def join_parts(parts: list[Path], target: Path, schema: Any) -> None:
    """Join the parts in order into one file: JSONL, compressed or not, or Parquet with `schema`."""
    if target.suffix == ".parquet":
        _join_parquet(parts, target, schema)
        return
    with open(target, "wb") as file:
        # Without name and time in the header, equal rows give equal bytes.
        packed = target.suffix == ".gz"
        stream: Any = gzip.GzipFile("", "wb", 6, file, mtime=0) if packed else file
        for part in parts:
            with open(part, "rb") as content:
                shutil.copyfileobj(content, stream, 1 << 20)
        if packed:
            stream.close()


def _join_parquet(parts: list[Path], target: Path, schema: Any) -> None:
    arrow = import_extra("pyarrow", "parquet", "Writing Parquet files")
    parquet = import_extra("pyarrow.parquet", "parquet", "Writing Parquet files")
    with parquet.ParquetWriter(target, schema) as writer:
        for part in parts:
            if part.stat().st_size == 0:
                continue
            if part.suffix == ".parquet":
                with parquet.ParquetFile(part) as file:
                    for group in range(file.num_row_groups):
                        writer.write_table(file.read_row_group(group))
                continue
            with open(part, "rb") as lines:
                for chunk in _chunked(lines, len):
                    rows = [json.loads(line) for line in chunk]
                    writer.write_table(arrow.Table.from_pylist(rows, schema=schema))


def parts_schema(folder: Path) -> Any:
    """The unified schema of all parts; None where nothing was kept."""
    arrow = import_extra("pyarrow", "parquet", "Writing Parquet files")
    schema = None
    for path in sorted(folder.glob("*.schema")):
        found = arrow.ipc.read_schema(arrow.py_buffer(path.read_bytes()))
        schema = unified(schema, found, f"unit {int(path.stem)}")
    return schema
