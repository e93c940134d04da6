"""Statistics and examples of prepared documents, as JSON values: counts, lengths, and text split at target boundaries."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rush.data.conversations.documents_manifest import DocumentManifest, verify_documents
from rush.data.conversations.store import DocumentSet
from rush.data.holdout import held_out_note
from rush.data.inspect import quartiles
from rush.data.shards import SPLITS
from rush.data.tokenizer import Tokenizer
from rush.errors import RecipeError

BINS = 12
UNUSED_NAMED = 20
"""Maximum number of unused columns to list."""


def document_statistics(folder: str | Path) -> dict[str, Any]:
    """Counts and lengths of a prepared folder, and what was dropped."""
    folder = Path(folder)
    manifest = verify_documents(folder)
    asked = manifest.preparation
    return {
        "folder": str(folder),
        "source": asked["source"]["source"],
        "template": asked["template"],
        "paired": manifest.paired,
        "train_on": asked["train_on"],
        "sequence": asked["sequence"],
        "too_long": asked["too_long"],
        "bad_rows": asked["bad_rows"],
        "vocab_size": manifest.vocab_size,
        "content_sha256": manifest.content_sha256,
        "held_out_note": held_out_note(asked),
        "splits": {split: _split_statistics(folder, manifest, split) for split in SPLITS},
    }


def _split_statistics(folder: Path, manifest: DocumentManifest, split: str) -> dict[str, Any]:
    counts = manifest.counts[split]
    found: dict[str, Any] = asdict(counts) | {"trained_share": counts.trained / max(counts.tokens, 1)}
    if not counts.documents:
        return found
    lengths = DocumentSet(folder, split).lengths
    return found | {
        "mean_tokens": counts.tokens / counts.documents,
        "document_tokens": quartiles(lengths),
        "histogram": _histogram(lengths),
    }


def places(names: list[str]) -> str:
    """Row names, shortened for one file: `talks.jsonl:41, :43`."""
    short, before = [], None
    for name in names:
        file, _, place = name.rpartition(":")
        short.append(f":{place}" if file and file == before else name)
        before = file
    return ", ".join(short)


def left_out(splits: dict[str, Any]) -> list[list[str]]:
    """A table of dropped and truncated rows: split, reason, count, the first names."""
    lost = [
        [name, reason, f"{count:,}", places(counts["examples"].get(reason, []))]
        for name, counts in splits.items()
        for reason, count in counts["dropped"].items()
    ]
    return lost + [
        [
            name,
            "cut",
            f"{c['cut']:,}",
            f"{c['cut_tokens']:,} tokens lost: {places(c['examples'].get('cut', []))}",
        ]
        for name, c in splits.items()
        if c["cut"]
    ]


def unused_columns(splits: dict[str, Any]) -> str:
    """The unused columns, each with its number of rows; empty where there are none."""
    return _listed(splits, "unused")


def control_tokens(splits: dict[str, Any]) -> str:
    """The control tokens that turns spell out and what became of them, each with its number of rows."""
    return _listed(splits, "controls")


def _listed(splits: dict[str, Any], kind: str) -> str:
    total: Counter[str] = Counter()
    for counts in splits.values():
        total.update(counts[kind])
    named = [f"{name} ({total[name]:,} rows)" for name in sorted(total)]
    more = f" and {len(named) - UNUSED_NAMED:,} more" if len(named) > UNUSED_NAMED else ""
    return ", ".join(named[:UNUSED_NAMED]) + more


def _histogram(lengths: npt.NDArray[np.int64]) -> list[dict[str, int]]:
    """Documents by length, in at most a dozen bins of equal, round width."""
    longest = int(lengths.max())
    steps = (factor * 10**power for power in range(12) for factor in (1, 2, 5))
    width = next(step for step in steps if longest // step < BINS)
    bins = np.bincount(lengths // width)
    return [{"from": at * width, "below": (at + 1) * width, "documents": int(n)} for at, n in enumerate(bins)]


def document_examples(
    folder: str | Path, split: str = "train", count: int = 3, at: int | None = None
) -> list[dict[str, Any]]:
    """Documents as text, in pieces that are all target or all context: `count` spread over the split, or number `at`.

    For preferences `count` and `at` are pairs.
    """
    folder = Path(folder)
    documents = DocumentSet(folder, split)
    tokenizer = Tokenizer.load(folder / "tokenizer")
    each = 2 if documents.paired else 1
    total = len(documents) // each
    if at is not None and not 0 <= at < total:
        raise RecipeError(
            f"--at is {at}, but the {split} split holds {total:,}: allowed are 0 to {total - 1}."
        )
    chosen = [at] if at is not None else sorted({total * n // count for n in range(count)})
    wanted = (place * each + inner for place in chosen for inner in range(each))
    return [_example(documents, tokenizer, index) for index in wanted]


def _example(documents: DocumentSet, tokenizer: Tokenizer, index: int) -> dict[str, Any]:
    tokens, trained = documents.tokens(index), documents.trained(index)
    pieces = []
    for kept, run in itertools.groupby(range(len(tokens)), key=lambda place: bool(trained[place])):
        places = list(run)
        text = tokenizer.decode(tokens[places[0] : places[-1] + 1])
        pieces.append({"trained": kept, "tokens": len(places), "text": text})
    return {
        "name": documents.sample_name(index),
        "tokens": len(tokens),
        "trained": int(trained.sum()),
        "pieces": pieces,
    }
