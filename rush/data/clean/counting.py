"""Rare items: how often every item is seen, counted without keeping the items.

An item becomes eight bytes of a hash. Each unit writes its hashes with their counts, sorted; then sixteen tasks
each add up one sixteenth of the hashes over all units and write the rare ones. What then judges documents
looks hashes up in those files through a memory map. So memory holds the hashes of one unit, or a sixteenth of
the different ones, never the items; two items that share a hash (one chance in 4,000 among a hundred million
different ones) would be counted as one.
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
from rush.data.clean.removal import Removals
from rush.data.clean.row_files import FileRow
from rush.data.clean.stages import CleaningPipeline, RareItems
from rush.data.pipeline import leave_with_parent
from rush.files import replacing

HELD = 1 << 20  # counts gathered before they are added up

Counted = npt.NDArray[np.uint64]  # two rows: hashes, sorted, and how often each was seen


def num_parts(num_units: int) -> int:
    """How many tasks add up the counts: one is enough for what a few units hold."""
    return 16 if num_units >= 16 else 1


def nothing() -> Counted:
    return np.empty((2, 0), dtype=np.uint64)


def item_hash(item: str) -> int:
    return int.from_bytes(hashlib.blake2b(item.encode(), digest_size=8).digest(), "little")


def add_up(counted: Counted) -> Counted:
    """One entry per hash, sorted by hash."""
    order = np.argsort(counted[0], kind="stable")
    hashes = counted[0][order]
    if len(hashes) == 0:
        return nothing()
    first = np.flatnonzero(np.r_[True, hashes[1:] != hashes[:-1]])
    return np.stack([hashes[first], np.add.reduceat(counted[1][order], first)])


class PickItems(StageFilter):
    """Reads a row's items once, for the block that counts them; drops only where the field is missing."""

    stage: RareItems

    def judge(self, row: FileRow, document: Document) -> str | None:
        document.metadata["items"] = self.items(row)
        return None

    def items(self, row: FileRow) -> list[str]:
        items = items_at(row.values, self.field, row.name, self.stage.separator)
        return plain_items(items, self.field, row.name, self.stage.ignore_case)


class CountItems(PipelineStep):  # type: ignore[misc]
    """The counts of a unit, as one sorted file."""

    name = "item counts"
    type = "rush counter"

    def __init__(self, stage: RareItems, folder: str) -> None:
        super().__init__()
        self.once = stage.count == "documents"
        self.folder = folder

    def run(
        self, data: Iterable[Document] | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Document]:
        total = nothing()
        held = array("Q")
        for document in data or ():
            items = document.metadata["items"]
            held.extend(item_hash(item) for item in (set(items) if self.once else items))
            if len(held) >= HELD:
                total, held = _with(total, held), array("Q")
        total = _with(total, held)
        self.stat_update("items", value=total.shape[1])
        _save(Path(self.folder) / f"{rank:05d}.npy", total)
        yield from ()


def _with(total: Counted, held: array[int]) -> Counted:
    seen = np.asarray(held, dtype=np.uint64)
    return add_up(np.concatenate([total, np.stack([seen, np.ones_like(seen)])], axis=1))


def _save(path: Path, content: Counted) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.save(file, content)


class MergeCounts(PipelineStep):  # type: ignore[misc]
    """One sixteenth of the hashes, added up over all units: the rare ones are written."""

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
        leave_with_parent()
        total = nothing()
        held: list[Counted] = []
        for path in sorted(Path(self.counts).glob("*.npy")):
            held.append(_part(np.load(path, mmap_mode="r", allow_pickle=False), rank, world_size))
            if sum(part.shape[1] for part in held) >= HELD:
                total, held = add_up(np.concatenate([total, *held], axis=1)), []
        total = add_up(np.concatenate([total, *held], axis=1))
        _save(Path(self.rare) / f"{rank:02d}.npy", total[:, total[1] < self.min_count])
        self.stat_update("different items", value=total.shape[1])
        yield from ()


def _part(counted: Counted, part: int, parts: int) -> Counted:
    """The hashes whose first bits, read as a number, are `part`."""
    start = np.searchsorted(counted[0], np.uint64((part << 64) // parts))
    last = np.uint64(((part + 1 << 64) // parts) - 1)
    return np.array(counted[:, start : np.searchsorted(counted[0], last, side="right")])


class RareItemsFilter(PickItems):
    """Drops what contains a rare item."""

    def __init__(
        self, stage: RareItems, pipeline: CleaningPipeline, removals: Removals, rare: str, parts: int
    ) -> None:
        super().__init__(stage, pipeline, removals)
        self.rare = rare
        self.num_parts = parts
        self.parts: list[Counted] | None = None

    def judge(self, row: FileRow, document: Document) -> str | None:
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
        """How often a rare item was seen; None for one that is not rare."""
        assert self.parts is not None
        value = item_hash(item)
        hashes, counts = self.parts[value * self.num_parts >> 64]
        at = int(np.searchsorted(hashes, np.uint64(value)))
        return int(counts[at]) if at < len(hashes) and hashes[at] == value else None
