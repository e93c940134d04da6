"""The files to train on, as given or found in a folder, as patterns for `data.files`."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rush.errors import DataError

ROWS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")
TEXT = (".txt", ".md", ".text", ".rst")
COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True)
class DataFiles:
    patterns: tuple[str, ...]
    """For `data.files`."""
    paths: tuple[str, ...]
    ignored: tuple[str, ...] = ()
    """Files of folders that are not read."""


def find_files(given: Sequence[str]) -> DataFiles:
    """The files that the patterns match; for a folder, its files with rows, or else its texts."""
    if not given:
        raise DataError("rush start needs data: --data with files or folders.")
    patterns: list[str] = []
    ignored: list[str] = []
    for name in given:
        if os.path.isdir(name):
            found, left = _of_folder(name)
            patterns += found
            ignored += left
        else:
            patterns.append(glob.escape(name) if os.path.exists(name) else name)
    paths: dict[str, None] = {}
    for pattern in patterns:
        matches = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
        matches = [match for match in matches if not os.path.isdir(match)]
        if not matches:
            raise DataError(f"--data: nothing matches {pattern!r} (from {os.getcwd()}).")
        paths.update((match, None) for match in matches)
    return DataFiles(tuple(patterns), tuple(paths), tuple(ignored))


def _of_folder(name: str) -> tuple[list[str], list[str]]:
    files = [
        path for path in sorted(Path(name).rglob("*")) if path.is_file() and not path.name.startswith(".")
    ]
    rows = [path for path in files if _ending(path) in ROWS]
    taken = rows or [path for path in files if _ending(path) in TEXT]
    if not taken:
        raise DataError(
            f"--data: the folder {name} holds no file with one of the endings {', '.join((*ROWS, *TEXT))}; name the files."
        )
    endings = dict.fromkeys(_whole_ending(path) for path in taken)
    root = glob.escape(name.rstrip("/"))
    return [f"{root}/**/*{ending}" for ending in endings], [str(path) for path in files if path not in taken]


def _ending(path: Path) -> str:
    """The file extension without that of a compression."""
    name = path.name.lower()
    for compressed in COMPRESSED:
        name = name.removesuffix(compressed)
    return Path(name).suffix


def _whole_ending(path: Path) -> str:
    ends = [path.suffix] if path.suffix.lower() not in COMPRESSED else path.suffixes[-2:]
    return "".join(ends)
