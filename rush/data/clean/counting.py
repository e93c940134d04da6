"""Rare items: count every item by its hash.

An item is an 8-byte hash. Each unit writes its hashes and counts, sorted. Sixteen tasks each merge one sixteenth of the hashes
over all units and write the rare ones, which the filter reads through a memory map. So memory holds the hashes of one unit, or
a sixteenth of the distinct ones. Two items with the same hash (one chance in 4,000 among a hundred million) count as one.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from rush.data.clean.fields import items_at, plain_items
from rush.data.clean.filters import StageFilter
from rush.data.clean.removal import Removals, save_array
from rush.data.clean.row_files import FileRow
from rush.data.clean.stages import CleaningPipeline, RareItems
from rush.data.pipeline import exit_with_parent

BUFFERED = 1 << 20  # counts buffered before they are merged

Counts = npt.NDArray[np.uint64]  # two rows: sorted hashes, and their counts


def num_parts(num_units: int) -> int:
    """Number of merge tasks: one for a few units."""
    return 16 if num_units >= 16 else 1


def no_counts() -> Counts:
    return np.empty((2, 0), dtype=np.uint64)


def item_hash(item: str) -> int:
    return int.from_bytes(hashlib.blake2b(item.encode(), digest_size=8).digest(), "little")


def merge_counts(counted: Counts) -> Counts:
    """Sum the counts of equal hashes; sorted by hash."""
    order = np.argsort(counted[0], kind="stable")
    hashes = counted[0][order]
    if len(hashes) == 0:
        return no_counts()
    first = np.flatnonzero(np.r_[True, hashes[1:] != hashes[:-1]])
    return np.stack([hashes[first], np.add.reduceat(counted[1][order], first)])


class PickItems(StageFilter):
    """Reads the items of a row for `CountItems`; removes a row only where the field is missing."""

    stage: RareItems

    def removal_reason(self, row: FileRow, document: Document) -> str | None:
        document.metadata["items"] = self.items(row)
        return None

    def items(self, row: FileRow) -> list[str]:
        items = items_at(row.values, self.field, row.name, self.stage.separator)
        return plain_items(items, self.field, row.name, self.stage.ignore_case)


class CountItems(PipelineStep):  # type: ignore[misc]
    """Writes the counts of a unit as one sorted file."""

    name = "item counts"
    type = "rush counter"

    def __init__(self, stage: RareItems, folder: str) -> None:
        super().__init__()
        self.once = stage.count == "documents"
        self.folder = folder

    def run(
        self, data: Iterable[Document] | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Document]:
        total = no_counts()
        held = array("Q")
        for document in data or ():
            items = document.metadata["items"]
            held.extend(item_hash(item) for item in (set(items) if self.once else items))
            if len(held) >= BUFFERED:
                total, held = _with_buffer(total, held), array("Q")
        total = _with_buffer(total, held)
        self.stat_update("items", value=total.shape[1])
        save_array(Path(self.folder) / f"{rank:05d}.npy", total)
        yield from ()


def _with_buffer(total: Counts, held: array[int]) -> Counts:
    seen = np.asarray(held, dtype=np.uint64)
    return merge_counts(np.concatenate([total, np.stack([seen, np.ones_like(seen)])], axis=1))


class MergeCounts(PipelineStep):  # type: ignore[misc]
    """Merges one part of the hashes over all units and writes the rare ones."""

    name = "rare items"
    type = "rush counter"

    def __init__(self, stage: RareItems, counts: str, rare: str) -> None:
        super().__init__()
        self.min_count = stage.min_count
        self.counts = counts
        self.rare = rare

    def run(
        self, data: Iterable[Document] | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Document]:
        exit_with_parent()
        total = no_counts()
        held: list[Counts] = []
        for path in sorted(Path(self.counts).glob("*.npy")):
            held.append(_part(np.load(path, mmap_mode="r", allow_pickle=False), rank, world_size))
            if sum(part.shape[1] for part in held) >= BUFFERED:
                total, held = merge_counts(np.concatenate([total, *held], axis=1)), []
        total = merge_counts(np.concatenate([total, *held], axis=1))
        save_array(Path(self.rare) / f"{rank:02d}.npy", total[:, total[1] < self.min_count])
        self.stat_update("different items", value=total.shape[1])
        yield from ()


def _part(counted: Counts, part: int, parts: int) -> Counts:
    """The hashes of one of `parts` equal ranges."""
    start = np.searchsorted(counted[0], np.uint64((part << 64) // parts))
    last = np.uint64(((part + 1 << 64) // parts) - 1)
    return np.array(counted[:, start : np.searchsorted(counted[0], last, side="right")])


class RareItemsFilter(PickItems):
    """Removes documents with a rare item."""

    def __init__(
        self, stage: RareItems, pipeline: CleaningPipeline, removals: Removals, rare: str, parts: int
    ) -> None:
        super().__init__(stage, pipeline, removals)
        self.rare = rare
        self.num_parts = parts
        self.parts: list[Counts] | None = None

    def removal_reason(self, row: FileRow, document: Document) -> str | None:
        if self.parts is None:
            paths = [Path(self.rare) / f"{part:02d}.npy" for part in range(self.num_parts)]
            self.parts = [np.load(path, mmap_mode="r", allow_pickle=False) for path in paths]
        rarest: tuple[int, str] | None = None
        for item in self.items(row):
            count = self._count(item)
            if count is not None and (rarest is None or count < rarest[0]):
                rarest = (count, item)
        if rarest is None:
            return None
        times = f"{rarest[0]} time" + ("" if rarest[0] == 1 else "s")
        return f"{rarest[1]!r} seen {times}, fewer than {self.stage.min_count}"

    def _count(self, item: str) -> int | None:
        """The count of a rare item; None for one that is not rare."""
        assert self.parts is not None
        value = item_hash(item)
        hashes, counts = self.parts[value * self.num_parts >> 64]
        at = int(np.searchsorted(hashes, np.uint64(value)))
        return int(counts[at]) if at < len(hashes) and hashes[at] == value else None
