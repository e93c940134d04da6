"""Types for reading records leniently: missing or invalid values become None, drawn as a dash.

`rush.records` decides whether something is a record. A record may still be unfinished, from a machine without a datasheet, or
written by a later version, and a report of nine good rungs must not fail because of the tenth.

Text is cleaned here: characters that cannot be written as UTF-8 or that would control a terminal become the
replacement sign. The templates escape it for HTML.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator, PlainValidator, ValidationError, WrapValidator

Json = Any
T = TypeVar("T")


def text(value: Json) -> str | None:
    """A string or a plain number as clean text, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    clean = str(value).encode("utf-8", "replace").decode()
    return re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]", "\N{REPLACEMENT CHARACTER}", clean)


def shown(value: Json) -> str:
    """Any JSON value as text, for tables of keys that are not known by name."""
    return text(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) or ""


def real(value: Json) -> float | None:
    """A finite number, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e300:
        return None
    return float(value) if math.isfinite(value) else None


def positive(value: Json) -> float | None:
    """A number above 1e-300, so that it can be divided by; None for anything else."""
    found = real(value)
    return found if found is not None and found > 1e-300 else None


def whole(value: Json) -> int | None:
    found = real(value)
    return int(found) if found is not None else None


def table(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, dict) else {}


def items(value: Json) -> list[Json]:
    return value if isinstance(value, list) else []


def rates(value: Json) -> dict[str, float]:
    """The positive numbers of a table."""
    found = {text(key) or "": positive(part) for key, part in table(value).items()}
    return {key: part for key, part in found.items() if part is not None}


def numbers(value: Json) -> tuple[float, ...]:
    return tuple(part for part in map(real, items(value)) if part is not None)


def _bounds(value: Json) -> Json:
    """A measurement with `low` and `high` in place of its interval."""
    if not isinstance(value, dict):
        return value
    ends = numbers(value.get("ci95"))
    low, high = ends if len(ends) == 2 and ends[0] <= ends[1] else (None, None)
    return {**value, "low": low, "high": high}


def _required(read: Callable[[Json], T | None]) -> Callable[[Json], T]:
    def check(value: Json) -> T:
        found = read(value)
        if found is None:
            raise ValueError("not what it should be")
        return found

    return check


def _count(value: Json) -> int | None:
    found = whole(value)
    return found if found is not None and found > 0 else None


def _filled(value: Json) -> Json:
    if not value:
        raise ValueError("empty")
    return value


def word(default: str) -> PlainValidator:
    """Clean text, or the default where there is none."""
    return PlainValidator(lambda value: text(value) or default)


def _or_none(value: Json, validate: Callable[[Json], T]) -> T | None:
    try:
        return validate(value)
    except ValidationError:
        return None


def _each(value: Json, validate: Callable[[Json], tuple[T, ...]]) -> tuple[T, ...]:
    return tuple(part for item in items(value) for part in _or_none([item], validate) or ())


Text = Annotated[str | None, PlainValidator(text)]
Word = Annotated[str, PlainValidator(_required(text))]
Real = Annotated[float | None, PlainValidator(real)]
Positive = Annotated[float | None, PlainValidator(positive)]
PositiveNumber = Annotated[float, PlainValidator(_required(positive))]
Whole = Annotated[int | None, PlainValidator(whole)]
Count = Annotated[int, PlainValidator(_required(_count))]
Flag = Annotated[bool, PlainValidator(lambda value: value is True)]
Table = Annotated[Mapping[str, Json], PlainValidator(table)]
Tables = Annotated[
    tuple[Mapping[str, Json], ...], PlainValidator(lambda value: tuple(map(table, items(value))))
]
Rates = Annotated[Mapping[str, float], PlainValidator(rates)]
Numbers = Annotated[tuple[float, ...], PlainValidator(numbers)]
Rows = Annotated[
    tuple[tuple[float, ...], ...], PlainValidator(lambda value: tuple(map(numbers, items(value))))
]
Series = Annotated[tuple[float | None, ...], PlainValidator(lambda value: tuple(map(real, items(value))))]
OrNone = Annotated[T | None, WrapValidator(_or_none)]
Bounded = Annotated[T, BeforeValidator(_bounds)]
NonEmpty = Annotated[T, BeforeValidator(_filled)]
Each = Annotated[tuple[T, ...], WrapValidator(_each)]
"""The items that are what they should be; the others are left out."""
