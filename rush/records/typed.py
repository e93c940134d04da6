"""Typed records: one JSON object in one file, a TypedDict for each kind, checked by pydantic when written and when read.

What makes a record usable is checked: its format, the keys that every reader needs, closed lists of statuses and
verdicts, measurements inside their intervals. Everything else (`SkipValidation`) is kept as recorded, so that a gap
or a key of a later version costs one figure and not the page.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Required, TypeVar

from pydantic import AfterValidator, Field, SkipValidation, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from rush.errors import DataError, RushError
from rush.files import parse_json, read_file, write_json_atomic

T = TypeVar("T")


@dataclass(frozen=True)
class RecordFile(Generic[T]):
    """A kind of record: its type, the file that holds it in a folder, the command that writes it."""

    schema: TypeAdapter[T]
    file: str
    what: str
    command: str
    format: int | str = 1

    def read(self, path: Path) -> T:
        """The record in a file or in a folder; a DataError that names the place when it is something else."""
        file = self._file(path)
        try:
            tree: T = parse_json(read_file(file))
        except (FileNotFoundError, NotADirectoryError):
            raise DataError(
                f"there is no {self.what} at {file}; give a folder that `{self.command}` wrote."
            ) from None
        except OSError as error:
            raise DataError(
                f"{file} cannot be read ({error.strerror}); give a folder that `{self.command}` wrote."
            ) from None
        except ValueError as error:
            raise DataError(f"{file} is not JSON ({error}); run `{self.command}` again.") from None
        self.check(tree, str(file))
        return tree

    def using(self, path: Path) -> AbstractContextManager[None]:
        """Refuse the record of a file in one message where something in it breaks what is done with it."""
        return fitting(str(self._file(path)), self.what, self.command)

    def write(self, path: Path, record: T) -> None:
        """Check the record and replace the file atomically."""
        file = self._file(path)
        self.check(record, str(file))
        write_json_atomic(file, record)

    def check(self, tree: Any, where: str) -> None:
        """Raise a DataError that names the first thing that is wrong, what was found and what is allowed."""
        if not isinstance(tree, Mapping):
            raise DataError(f"{where} holds no {self.what}: found {type(tree).__name__}, allowed: an object.")
        if tree.get("format") != self.format:
            raise DataError(
                f"{where}: format is {tree.get('format')!r}; this version reads format {self.format!r}. "
                f"Run `{self.command}` again, or use the rush that wrote it."
            )
        try:
            self.schema.validate_python(tree, strict=True)
        except ValidationError as error:
            raise DataError(
                f"{where}: {wrong_field(error)}. The record is damaged; run `{self.command}` again."
            ) from None

    def _file(self, path: Path) -> Path:
        return path if os.path.isfile(path) or path.suffix == ".json" else path / self.file


@contextmanager
def fitting(where: str, what: str, command: str) -> Iterator[None]:
    """Refuse a record in one message where a value that is kept as recorded breaks what is done with it.

    A page needs more of a record than `check` asks for, and a damaged or foreign one may hold anything there.
    """
    try:
        yield
    except (RushError, OSError, MemoryError):
        raise
    except Exception as error:
        raise DataError(
            f"{where}: a value of the {what} is not what it should be ({type(error).__name__}: {error!s:.200}). "
            f"The record is damaged, or of another version; run `{command}` again."
        ) from error


def wrong_field(failed: ValidationError) -> str:
    """The first thing that is wrong: where, what was found, what is allowed."""
    error, place = failed.errors()[0], ""
    for part in error["loc"]:
        place += f"[{part}]" if isinstance(part, int) else f".{part}" if place else part
    outer, _, key = place.rpartition(".")
    inside = f"{outer}: {key}" if outer else key or "it"
    match error["type"]:
        case "missing":
            return f"{inside} is missing"
        case "one_of":
            return f"{inside} is {error['input']!r:.80}; {error['msg']}"
        case "value_error":
            return f"{place}: {error['ctx']['error']}"
        case _:
            return f"{inside} is {error['input']!r:.80}; {error['msg'][0].lower()}{error['msg'][1:]}"


def one_of(*allowed: str) -> AfterValidator:
    """One word of a closed list. The type stays `str`: whoever writes a record gets its words from elsewhere."""

    def check(value: str) -> str:
        if value not in allowed:
            raise PydanticCustomError("one_of", "allowed: {allowed}", {"allowed": ", ".join(allowed)})
        return value

    return AfterValidator(check)


def having(key: str, *allowed: str) -> AfterValidator:
    """An object whose `key` is one word of a closed list; the rest of it is kept as recorded."""

    def check(tree: T) -> T:
        found = tree.get(key) if isinstance(tree, Mapping) else None
        if found not in allowed:
            raise ValueError(f"{key} is {found!r:.80}; allowed: {', '.join(allowed)}")
        return tree

    return AfterValidator(check)


class Measured(TypedDict, total=False):
    """A median with its 95 % interval and the samples behind it."""

    median: Required[float]
    ci95: Required[Annotated[list[float], Field(min_length=2, max_length=2)]]
    n: SkipValidation[int]
    samples: Required[Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1)]]
    processes: SkipValidation[list[list[float]]]


def _inside_interval(measured: Measured) -> Measured:
    low, high = measured["ci95"]
    if not low <= measured["median"] <= high:
        raise ValueError(f"the median {measured['median']!r} is outside its interval {[low, high]}")
    return measured


Measurement = Annotated[Measured, AfterValidator(_inside_interval)]
