"""Records that are checked when they are written and when they are read: what all of them share.

A record is one JSON object with a `format`; a folder holds it under a fixed name. What is damaged, of
another version or something else is refused with one sentence that names the place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rush.errors import DataError


def read_json(path: Path, file_name: str, what: str, command: str) -> tuple[Any, Path]:
    """The JSON in a file, or in the file of that name in a folder; and which file it was."""
    file = path / file_name if path.is_dir() else path
    try:
        return json.loads(file.read_text(encoding="utf-8")), file
    except FileNotFoundError:
        raise DataError(f"there is no {what} at {file}; give a folder that `{command}` wrote.") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{file} is not JSON ({error}); run `{command}` again.") from None


def check_head(tree: Any, what: str, version: int, where: str) -> None:
    """An object, in the format this version reads."""
    if not isinstance(tree, Mapping):
        raise DataError(f"{where} holds no {what}: found {type(tree).__name__}, allowed: an object.")
    if tree.get("format") != version:
        raise DataError(f"{where}: format is {tree.get('format')!r}; this version reads format {version}.")


def check_of(tree: Any, key: str, kind: type | tuple[type, ...], where: str) -> None:
    """`tree` is an object whose `key` is of this kind."""
    if not isinstance(tree, Mapping):
        raise DataError(f"{where} is {tree!r:.80}; allowed: an object.")
    if not isinstance(tree.get(key), kind) or isinstance(tree.get(key), bool):
        raise DataError(f"{where}: {key} is {tree.get(key)!r:.80}; the record is damaged or of another kind.")


def check_in(tree: Mapping[str, Any], key: str, allowed: tuple[str, ...], where: str) -> None:
    if tree.get(key) not in allowed:
        raise DataError(f"{where}: {key} is {tree.get(key)!r:.80}; allowed: {', '.join(allowed)}.")


def check_measured(measured: Any, where: str) -> None:
    """A median inside its interval, with the positive samples it came from."""
    if not isinstance(measured, Mapping):
        raise DataError(f"{where} is {measured!r:.80}; allowed: an object with median, ci95 and samples.")
    samples, interval, median = (measured.get(key) for key in ("samples", "ci95", "median"))
    if not (isinstance(samples, list) and samples and all(_number(one) and one > 0 for one in samples)):
        raise DataError(f"{where}.samples must be positive numbers, at least one.")
    if not (isinstance(interval, list) and len(interval) == 2 and all(map(_number, interval))):
        raise DataError(f"{where}.ci95 is {interval!r:.80}; allowed: two numbers.")
    if not (_number(median) and interval[0] <= median <= interval[1]):
        raise DataError(f"{where}: the median {median!r} is outside its interval {interval}.")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
