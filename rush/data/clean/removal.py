"""Rows that a stage removed: their indices, and a sample of them.

datatrove's filters pass removed documents to an "exclusion writer". This one keeps four bytes per row and a few rows in full:
those with the lowest hash of their position, which does not depend on how the work is divided and spreads them over the data.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from rush.files import replacing, write_atomic

CLIP = 4000
MEMBERS = 200


@dataclass(frozen=True)
class Example:
    """A removed document: its position, the reason, and its row (long texts clipped)."""

    place: str
    document: str
    reason: str
    row: Any


def place_hash(unit: int, index: int) -> str:
    return hashlib.blake2b(f"{unit}:{index}".encode(), digest_size=8).hexdigest()


class Removals:
    """Collects the rows that one stage removes from one unit; written at the end of the unit."""

    def __init__(self, folder: str, examples: int) -> None:
        self.folder = folder
        self.examples = examples
        self.unit: int | None = None
        self.rows = array("I")
        self.missing = 0
        self.kept: list[tuple[Example, int]] = []

    def __enter__(self) -> Self:
        return self

    def write(self, document: Any, rank: int = 0) -> None:
        """Called by a filter for each document it drops."""
        row = document.metadata["row"]
        self.missing += document.metadata.get("missing", False)
        self.add(rank, row.index, row.name, row.values, document.metadata.get("reason", ""))

    def add(self, unit: int, index: int, name: str, content: Any, reason: str) -> None:
        self.unit = unit
        self.rows.append(index)
        place = place_hash(unit, index)
        if len(self.kept) >= self.examples and place >= self.kept[-1][0].place:
            return
        example = Example(place, name, reason, clipped(content, CLIP))
        self.kept.append((example, len(self.rows) - 1))
        self.kept = sorted(self.kept, key=lambda entry: entry[0].place)[: self.examples]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None or self.unit is None:
            return
        folder = Path(self.folder)
        save_array(folder / f"{self.unit:05d}.npy", np.asarray(self.rows, dtype=np.uint32))
        examples = [asdict(self.explained(example, number)) for example, number in self.kept]
        content = {"removed": len(self.rows), "missing": self.missing, "examples": examples}
        write_atomic(folder / f"{self.unit:05d}.json", json.dumps(content, ensure_ascii=False, default=str))

    def explained(self, example: Example, number: int) -> Example:
        """The example with its reason, where the filter gave none; `number` is its index among the unit's removals."""
        return example


def save_array(path: Path, content: npt.NDArray[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.save(file, content)


@dataclass(frozen=True)
class Removed:
    """The rows that a stage removed from all units."""

    removed: int
    missing: int
    examples: tuple[Example, ...]


def removed_rows(folders: Iterable[str], unit: int) -> npt.NDArray[np.bool_] | None:
    """A mask of the rows of a unit that earlier passes removed."""
    paths = [Path(folder) / f"{unit:05d}.npy" for folder in folders]
    rows = [np.load(path, allow_pickle=False) for path in paths if path.is_file()]
    if not rows:
        return None
    indices = np.concatenate(rows)
    removed = np.zeros(int(indices.max()) + 1, dtype=np.bool_)
    removed[indices] = True
    return removed


def gather(folders: Iterable[str], examples: int) -> Removed:
    """Counts over all units, and the examples with the lowest hashes."""
    removed = missing = 0
    kept: list[Example] = []
    for content in _contents(folders):
        removed += content["removed"]
        missing += content["missing"]
        kept += [Example(**entry) for entry in content["examples"]]
        kept = sorted(kept, key=lambda example: example.place)[:examples]
    return Removed(removed, missing, tuple(kept))


def _contents(folders: Iterable[str]) -> Iterator[dict[str, Any]]:
    for folder in folders:
        for path in sorted(Path(folder).glob("*.json")):
            yield json.loads(path.read_bytes())


def clipped(value: Any, limit: int) -> Any:
    """`value` with long texts and lists clipped."""
    if isinstance(value, str):
        return value if len(value) <= limit else f"{value[:limit]} … ({len(value):,} characters)"
    if isinstance(value, dict):
        return {key: clipped(inner, limit) for key, inner in value.items()}
    if isinstance(value, list):
        more = [f"… ({len(value):,} members)"] if len(value) > MEMBERS else []
        return [clipped(inner, limit) for inner in value[:MEMBERS]] + more
    return value
