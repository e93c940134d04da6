"""Checks of a batch's labels: is each the next token, and is any unmasked?

A mask over every answer, or labels shifted by one position, train without an error, and shifted labels even reach a low loss.
So the batch itself is checked, not the loss.

Legend: b rows, t positions.
"""

from __future__ import annotations

import math
from collections import Counter

import torch

from rush.data import Batch
from rush.data.batch import IGNORED

_SHIFTS = {0: "the token itself", 2: "the token after the next", -1: "the token before"}


def misaligned(batch: Batch) -> str | None:
    """How the labels are shifted, where they are not the next token; None where they are.

    The last label of a document cannot be checked: its token is not among the inputs.
    """
    checked, right = _matches(batch, 1)
    if checked == 0 or right >= 0.9 * checked:
        return None
    wrong = f"{checked - right} of {checked} labels are not the next token"
    for shift, what in _SHIFTS.items():
        others, found = _matches(batch, shift)
        if others and found >= 0.9 * others:
            return f"{wrong}; they are {what}"
    return wrong


def _matches(batch: Batch, shift: int) -> tuple[int, int]:
    """How many labels have a token `shift` positions later in their document, and how many are equal to it."""
    tokens_bt, labels_bt = batch.tokens_bt, batch.labels_bt
    length = tokens_bt.shape[1]
    if abs(shift) >= length:
        return 0, 0
    here, there = (
        (slice(0, length - shift), slice(shift, length))
        if shift >= 0
        else (slice(-shift, length), slice(0, length + shift))
    )
    known = labels_bt[:, here] != IGNORED
    if batch.documents_bt is not None:
        known &= batch.documents_bt[:, here] == batch.documents_bt[:, there]
    else:
        known &= ~_last_labels(labels_bt)[:, here]
    equal = known & (labels_bt[:, here] == tokens_bt[:, there])
    return int(known.sum()), int(equal.sum())


def _last_labels(labels_bt: torch.Tensor) -> torch.Tensor:
    """The last label of each row."""
    labelled = labels_bt != IGNORED
    after = labelled.flip(1).cumsum(1).flip(1)
    return labelled & (after == 1)


def entropy_floor(*batches: Batch) -> float:
    """The lowest possible mean loss on these batches: the entropy of the labels that follow the same prefix."""
    continuations: dict[int, Counter[int]] = {}
    for batch in batches:
        _count_continuations(batch, continuations)
    total = count = 0.0
    for counter in continuations.values():
        size = counter.total()
        count += size
        total += sum(n * math.log(size / n) for n in counter.values())
    return total / count if count else 0.0


def _count_continuations(batch: Batch, continuations: dict[int, Counter[int]]) -> None:
    """Add the labels that follow each prefix."""
    tokens, labels = batch.tokens_bt.tolist(), batch.labels_bt.tolist()
    documents = None if batch.documents_bt is None else batch.documents_bt.tolist()
    for row, row_labels in enumerate(labels):
        prefix, document = 0, None
        for place, label in enumerate(row_labels):
            now = None if documents is None else documents[row][place]
            prefix = hash((0 if now != document else prefix, tokens[row][place]))
            document = now
            if label != IGNORED:
                continuations.setdefault(prefix, Counter())[label] += 1
