"""Packing: the assignment of documents to rows, for an epoch at once.

A `PackingPlan` of an epoch is a pure function of document lengths, seed and epoch, and a position in it is one number. Padding
takes as much compute as real tokens. Padding rows to the longest wastes most; sorting by length first wastes little, but makes
batches of equal lengths; packing several documents into a row wastes almost nothing, if attention stays within each document
(`rush.data.row_tensors`).

A document of n tokens has n - 1 positions: the last token has no label. One with more positions than `batch.sequence` is split
into pieces, each a document of its own.
Legend: piece (document, first position, one past the last), row, micro batch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from rush.errors import DataError

Ints = npt.NDArray[np.int64]
Mix = Callable[[int], Ints]
"""A permutation of `count` items: the epoch's shuffle, or the identity."""


def in_order(count: int) -> Ints:
    return np.arange(count, dtype=np.int64)


@dataclass(frozen=True)
class PackingPlan:
    """The micro batches of an epoch."""

    pieces: Ints
    """[n, 3]: document, first position, one past the last."""
    rows: Ints
    """[r + 1]: the first piece of each row, and the end."""
    batches: Ints
    """[m + 1]: the first row of each micro batch, and the end."""
    dropped: int = 0
    """Tokens of the epoch that are in no row."""

    def __len__(self) -> int:
        return len(self.batches) - 1

    def batch(self, index: int) -> list[Ints]:
        """The rows of a micro batch, each the pieces in it."""
        rows = range(self.batches[index], self.batches[index + 1])
        return [self.pieces[self.rows[row] : self.rows[row + 1]] for row in rows]


class Packing(Protocol):
    """A packing. Its fields are the knobs."""

    name: ClassVar[str]
    isolated: ClassVar[bool]
    """Whether a row holds several documents that attend only within themselves."""
    one_row: ClassVar[bool]
    """Whether a micro batch is one long row."""
    pairs: ClassVar[bool]
    """Whether it can keep the two answers of a preference together."""

    def plan(self, lengths: Ints, order: Ints, micro: int, sequence: int, mix: Mix) -> PackingPlan:
        """Assign the documents of `order` to rows; `lengths` are the tokens of all documents."""
        ...

    def row_length(self, longest: int, sequence: int) -> int:
        """The padded row length of a micro batch whose longest row has `longest` positions."""
        ...


@dataclass(frozen=True)
class Pad:
    """One document per row, padded to one of `shapes` lengths; 0: to the longest row."""

    shapes: int = 1
    name: ClassVar[str] = "pad"
    isolated: ClassVar[bool] = False
    one_row: ClassVar[bool] = False
    pairs: ClassVar[bool] = True

    def plan(self, lengths: Ints, order: Ints, micro: int, sequence: int, mix: Mix) -> PackingPlan:
        pieces = _pieces(lengths, order, sequence)
        return PackingPlan(pieces, in_order(len(pieces) + 1), _boundaries(len(pieces), micro))

    def row_length(self, longest: int, sequence: int) -> int:
        return longest if self.shapes == 0 else _round_up(longest, sequence, self.shapes)


@dataclass(frozen=True)
class Bucket:
    """Like `Pad`, with documents sorted by length within windows, and the micro batches shuffled."""

    shapes: int = 1
    window: int = 100
    """Micro batches whose documents are sorted together."""
    unsorted: Counter[str] = field(default_factory=Counter, compare=False, repr=False)
    """Tokens and padding that the first micro batches of every plan would have without sorting."""
    name: ClassVar[str] = "bucket"
    isolated: ClassVar[bool] = False
    one_row: ClassVar[bool] = False
    pairs: ClassVar[bool] = False

    def plan(self, lengths: Ints, order: Ints, micro: int, sequence: int, mix: Mix) -> PackingPlan:
        pieces = _pieces(lengths, order, sequence)
        sizes = _sizes(pieces)
        self._note_unsorted(pieces[: self.window * micro], micro, sequence)
        for window in _windows(len(pieces), self.window * micro):
            pieces[window] = pieces[window][np.argsort(sizes[window], kind="stable")]
        batches = [pieces[some] for some in _windows(len(pieces), micro)]
        batches = [batches[place] for place in mix(len(batches))]
        first = np.cumsum([0, *map(len, batches)])
        return PackingPlan(np.concatenate(batches), in_order(len(pieces) + 1), first)

    def _note_unsorted(self, pieces: Ints, micro: int, sequence: int) -> None:
        plan = PackingPlan(pieces, in_order(len(pieces) + 1), _boundaries(len(pieces), micro))
        tokens, padding = padded_tokens(plan, self, micro, sequence)
        self.unsorted.update(tokens=tokens, padding=padding)

    def row_length(self, longest: int, sequence: int) -> int:
        return Pad(self.shapes).row_length(longest, sequence)


@dataclass(frozen=True)
class Concat:
    """All documents as one token stream, split every `batch.sequence` tokens; the rest at the end is dropped."""

    name: ClassVar[str] = "pack_concat"
    isolated: ClassVar[bool] = False
    one_row: ClassVar[bool] = False
    pairs: ClassVar[bool] = False

    def plan(self, lengths: Ints, order: Ints, micro: int, sequence: int, mix: Mix) -> PackingPlan:
        ends = np.cumsum(lengths[order])
        total = int(ends[-1])
        num_rows = total // sequence
        if num_rows == 0:
            raise DataError(
                f"All documents together are {total} tokens, less than one row of batch.sequence = {sequence}, so "
                "pack_concat has no row. Use more documents or a shorter sequence."
            )
        edges = np.arange(1, num_rows + 1, dtype=np.int64) * sequence
        stops = np.union1d(ends[ends < edges[-1]], edges)
        starts = np.concatenate(([0], stops[:-1]))
        which = np.searchsorted(ends, starts, side="right")
        begins = (ends - lengths[order])[which]
        pieces = np.stack([order[which], starts - begins, stops - begins], axis=1)
        rows = np.searchsorted(starts, np.concatenate(([0], edges))).astype(np.int64)
        return PackingPlan(pieces, rows, _boundaries(num_rows, micro), dropped=total - num_rows * sequence)

    def row_length(self, longest: int, sequence: int) -> int:
        return sequence


@dataclass(frozen=True)
class BestFit:
    """Best-fit decreasing: rows of `batch.sequence`, each document whole, in the fullest row with room, longest first."""

    window: int = 4096
    """Documents that are packed together; rows are shuffled afterwards."""
    name: ClassVar[str] = "pack_best_fit"
    isolated: ClassVar[bool] = True
    one_row: ClassVar[bool] = False
    pairs: ClassVar[bool] = False

    def plan(self, lengths: Ints, order: Ints, micro: int, sequence: int, mix: Mix) -> PackingPlan:
        pieces = _pieces(lengths, order, sequence)
        sizes, most = _sizes(pieces), most_documents(lengths, sequence)
        rows: list[Ints] = []
        for window in _windows(len(pieces), self.window):
            inside = pieces[window]
            rows += [inside[row] for row in best_fit(sizes[window].tolist(), sequence, most)]
        rows = [rows[place] for place in mix(len(rows))]
        first = np.cumsum([0, *map(len, rows)])
        return PackingPlan(np.concatenate(rows), first, _boundaries(len(rows), micro))

    def row_length(self, longest: int, sequence: int) -> int:
        return sequence


@dataclass(frozen=True)
class Flatten:
    """One row of `batch.micro` × `batch.sequence` tokens per micro batch, of whole documents in order; where the next does not fit,
    the largest that fits is taken from the following ones."""

    window: int = 1024
    """Number of following documents to choose from."""
    name: ClassVar[str] = "flatten"
    isolated: ClassVar[bool] = True
    one_row: ClassVar[bool] = True
    pairs: ClassVar[bool] = False

    def plan(self, lengths: Ints, order: Ints, micro: int, sequence: int, mix: Mix) -> PackingPlan:
        pieces = _pieces(lengths, order, sequence)
        most = most_documents(lengths, micro * sequence)
        rows = list(fill_rows(_sizes(pieces).tolist(), micro * sequence, most, self.window))
        # The last row is the emptiest, and some documents were taken early: the shuffle spreads both.
        rows = [rows[place] for place in mix(len(rows))]
        first = np.cumsum([0, *map(len, rows)])
        return PackingPlan(pieces[np.concatenate(rows)], first, in_order(len(rows) + 1))

    def row_length(self, longest: int, sequence: int) -> int:
        return longest


def best_fit(sizes: list[int], capacity: int, most: int) -> list[list[int]]:
    """Best-fit decreasing: each item, largest first, into the fullest row with room; at most `most` per row."""
    rows: list[list[int]] = []
    open_rows: list[
        tuple[int, int]
    ] = []  # (space left, row), sorted: the first with enough space is the fullest
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        found = bisect_left(open_rows, (sizes[place], -1))
        if found == len(open_rows):
            space, row = capacity, len(rows)
            rows.append([])
        else:
            space, row = open_rows.pop(found)
        rows[row].append(place)
        space -= sizes[place]
        if space and len(rows[row]) < most:
            insort(open_rows, (space, row))
    return rows


def fill_rows(sizes: list[int], capacity: int, most: int, window: int) -> Iterator[list[int]]:
    """Items in order, row by row; the space at the end of a row is filled from the next `window` items."""
    ahead: list[
        tuple[int, int]
    ] = []  # (size, -place) of what is not taken: of equal ones the first comes last
    taken = [False] * len(sizes)
    seen = following = 0
    row: list[int] = []
    space = capacity
    while following < len(sizes):
        while seen < min(len(sizes), following + window):
            insort(ahead, (sizes[seen], -seen))
            seen += 1
        found = bisect_left(ahead, (sizes[following], -following))
        if sizes[following] > space:
            found = bisect_right(ahead, (space, 0)) - 1
        if found < 0 or len(row) == most:
            yield row
            row, space = [], capacity
            continue
        size, place = ahead.pop(found)
        taken[-place] = True
        row.append(-place)
        space -= size
        while following < len(sizes) and taken[following]:
            following += 1
    if row:
        yield row


def most_documents(lengths: Ints, capacity: int) -> int:
    """The maximum number of documents per row: four times the average, rounded up to a power of two.

    The limit gives `starts_n` one length in every batch, so that a compiler sees one shape; a row of unusually many short
    documents is closed before it is full.
    """
    positions = max(1.0, float(lengths.mean()) - 1)
    return 1 << max(4, int(np.ceil(np.log2(max(1.0, 4 * capacity / positions)))))


def padded_tokens(plan: PackingPlan, packing: Packing, micro: int, sequence: int) -> tuple[int, int]:
    """Tokens of a plan's micro batches, and how many of them are padding."""
    real, whole = 0, 0
    for index in range(len(plan)):
        sizes = [int(_sizes(row).sum()) for row in plan.batch(index)]
        longest = micro * sequence if packing.one_row else max(sizes)
        real += sum(sizes)
        whole += (1 if packing.one_row else micro) * packing.row_length(longest, sequence)
    return whole, whole - real


def _pieces(lengths: Ints, order: Ints, sequence: int) -> Ints:
    """The pieces of all documents in order; documents longer than a row have several."""
    positions = lengths[order] - 1
    counts = -(-positions // sequence)
    number = in_order(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = number * sequence
    stops = np.minimum(starts + sequence, np.repeat(positions, counts))
    return np.stack([np.repeat(order, counts), starts, stops], axis=1)


def _sizes(pieces: Ints) -> Ints:
    sizes: Ints = pieces[:, 2] - pieces[:, 1]
    return sizes


def _boundaries(count: int, each: int) -> Ints:
    """Boundaries of `count` items in groups of `each`; the last may be smaller."""
    return np.append(np.arange(0, count, each, dtype=np.int64), count)


def _windows(count: int, each: int) -> Iterator[slice]:
    return (slice(first, first + each) for first in range(0, count, each))


def _round_up(length: int, limit: int, shapes: int) -> int:
    each = -(-limit // shapes)
    return min(limit, -(-length // each) * each)


def join_plans(plans: Iterable[PackingPlan]) -> PackingPlan:
    """Concatenate plans."""
    listed = list(plans)
    rows, batches, num_pieces, num_rows = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)], 0, 0
    for plan in listed:
        rows.append(plan.rows[1:] + num_pieces)
        batches.append(plan.batches[1:] + num_rows)
        num_pieces, num_rows = num_pieces + len(plan.pieces), num_rows + len(plan.rows) - 1
    pieces = np.concatenate([plan.pieces for plan in listed])
    dropped = sum(plan.dropped for plan in listed)
    return PackingPlan(pieces, np.concatenate(rows), np.concatenate(batches), dropped)
