"""The held-out split: a fraction of the documents, selected by a hash of each; of little data, one document.

A fraction of 1 % of five documents is usually empty, and a run that validates could not start. Then the document with the
lowest hash is held out: the first that a larger fraction would select, so the choice depends only on the documents and the
seed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable


def split_of(text: str, seed: int, validation: float) -> str:
    """The split of a document. Duplicates are in the same split, so no validation text is trained on."""
    return "validation" if _hash(text, seed) < validation * 2.0**64 else "train"


def share_that_holds(texts: Iterable[str], seed: int, validation: float) -> float:
    """The share, or the least one that holds a document where this one holds none and another document is left to train on.

    Reads until the first document that is held out, which is soon found in a large corpus.
    """
    if not validation:
        return validation
    lowest: int | None = None
    others = False
    for text in texts:
        found = _hash(text, seed)
        if found < validation * 2.0**64:
            return validation
        others = others or (lowest is not None and found != lowest)
        lowest = found if lowest is None else min(lowest, found)
    if lowest is None or not others:
        return validation
    return math.nextafter(lowest / 2.0**64, 1.0)


def held_out_note(preparation: dict[str, object]) -> str:
    """A sentence where one document is held out instead of the share that was asked for; empty otherwise."""
    if not {"held_out_share", "validation"} <= preparation.keys():
        return ""  # (a manifest of someone else may have one of them alone)
    return f"data.validation = {preparation['validation']} holds none of so few documents: one is held out instead."


def _hash(text: str, seed: int) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(seed).encode()).digest()
    return int.from_bytes(digest, "little")
