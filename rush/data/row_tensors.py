"""Tensors of packed rows: tokens, labels, document ids and document starts.

Attention needs the document of each token: `documents_bt` has the ids, for masks; `starts_n` has the starts in the flattened
micro batch and the end (cu_seqlens), for variable-length kernels. It is computed here, once per batch on the host, without a
synchronization. It has a fixed length: the end is repeated.

Padding after the last document of a row is a document of its own (or several, none longer than `batch.sequence`, the maximum
length that kernels are given), without labels.
Legend: b rows, t positions, n documents + 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rush.data.batch import IGNORED, Batch
from rush.data.documents import Documents
from rush.data.loader import SampleNames
from rush.data.packing import Ints, Packing

PADDING_TOKEN = 0
"""The padding token."""


def padded_batch(
    documents: Documents, rows: Sequence[Ints], num_rows: int, packing: Packing, sequence: int
) -> Batch:
    """Rows padded at their ends. Several documents in a row attend to each other."""
    sizes = [int((row[:, 2] - row[:, 1]).sum()) for row in rows]
    length = packing.row_length(max(sizes, default=sequence), sequence)
    tokens_bt, labels_bt = _empty(num_rows, length)
    for row, pieces in enumerate(rows):
        place = 0
        for piece in pieces:
            place = _write(documents, piece, tokens_bt[row], labels_bt[row], place)
    return Batch(
        torch.from_numpy(tokens_bt),
        torch.from_numpy(labels_bt),
        SampleNames(documents, [int(piece[0]) for pieces in rows for piece in pieces]),
        padding=tokens_bt.size - sum(sizes),
    )


def packed_batch(
    documents: Documents, rows: Sequence[Ints], num_rows: int, length: int, longest: int, most: int
) -> Batch:
    """Rows of several documents that attend only within themselves; at most `most` per row, none longer than `longest`."""
    tokens_bt, labels_bt = _empty(num_rows, length)
    positions_bt, documents_bt = np.zeros_like(tokens_bt), np.zeros_like(tokens_bt)
    starts = [0]
    real = 0
    for row in range(num_rows):
        place = 0
        for number, piece in enumerate(rows[row] if row < len(rows) else ()):
            end = _write(documents, piece, tokens_bt[row], labels_bt[row], place)
            positions_bt[row, place:end] = np.arange(end - place)
            documents_bt[row, place:end] = number
            place = end
            starts.append(row * length + end)
        real += place
        while place < length:
            end = min(length, place + longest)
            positions_bt[row, place:end] = np.arange(end - place)
            documents_bt[row, place:end] = documents_bt[row, place - 1] + 1 if place else 0
            place = end
            starts.append(row * length + end)
    # At most `most` documents per row, and as many padding documents as an empty row needs.
    fixed = num_rows * (most + -(-length // longest)) + 1
    assert len(starts) <= fixed, f"{len(starts)} documents, {fixed} places for them"
    starts += [num_rows * length] * (fixed - len(starts))
    return Batch(
        torch.from_numpy(tokens_bt),
        torch.from_numpy(labels_bt),
        SampleNames(documents, [int(piece[0]) for pieces in rows for piece in pieces]),
        positions_bt=torch.from_numpy(positions_bt),
        documents_bt=torch.from_numpy(documents_bt),
        starts_n=torch.tensor(starts, dtype=torch.int32),
        padding=num_rows * length - real,
    )


def _empty(num_rows: int, length: int) -> tuple[Ints, Ints]:
    tokens_bt = np.full((num_rows, length), PADDING_TOKEN, dtype=np.int64)
    return tokens_bt, np.full((num_rows, length), IGNORED, dtype=np.int64)


def _write(documents: Documents, piece: Ints, tokens_t: Ints, labels_t: Ints, place: int) -> int:
    """Write a piece at `place` of a row and return its end. A label is the next token of the document, if that is a target."""
    index, start, stop = (int(value) for value in piece)
    tokens, trained = documents.tokens(index), documents.trained(index)
    end = place + stop - start
    tokens_t[place:end] = tokens[start:stop]
    following, wanted = tokens[start + 1 : stop + 1], trained[start + 1 : stop + 1]
    labels_t[place : place + len(following)] = np.where(wanted, following, IGNORED)
    return end
