"""Statistics of a prepared corpus and one window as text, as JSON values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rush.data.dataset import TokenDataset
from rush.data.shards import SPLITS, Manifest, map_shard, read_manifest
from rush.data.tokenizer import Tokenizer


def corpus_statistics(folder: str | Path) -> dict[str, Any]:
    """Documents, tokens, bytes per token and document lengths of a prepared folder, by split."""
    folder = Path(folder)
    manifest = read_manifest(folder)
    return {
        "folder": str(folder),
        "source": manifest.preparation["source"]["source"],
        "dtype": manifest.dtype,
        "vocab_size": manifest.vocab_size,
        "tokenizer_sha256": manifest.tokenizer_sha256,
        "content_sha256": manifest.content_sha256,
        "shards": len(manifest.shards),
        "splits": {split: _split_statistics(folder, manifest, split) for split in SPLITS},
    }


def _split_statistics(folder: Path, manifest: Manifest, split: str) -> dict[str, Any]:
    shards = manifest.of(split)
    documents, tokens = manifest.documents(split), manifest.tokens(split)
    text_bytes = sum(shard.text_bytes for shard in shards)
    found: dict[str, Any] = {"documents": documents, "tokens": tokens, "text_bytes": text_bytes}
    if not shards:
        return found
    # Lengths and bytes per token do not count the end-of-document tokens.
    lengths = np.concatenate([np.diff(map_shard(folder, manifest, shard).starts) - 1 for shard in shards])
    return found | {
        "bytes_per_token": text_bytes / max(tokens - documents, 1),
        "document_tokens": quartiles(lengths),
        "histogram": _histogram(lengths),
    }


def quartiles(lengths: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, int]:
    found = np.percentile(lengths, [0, 25, 50, 75, 100], method="nearest")
    return dict(zip(("min", "p25", "median", "p75", "max"), map(int, found), strict=True))


def _histogram(lengths: np.ndarray[Any, np.dtype[np.int64]]) -> list[dict[str, int]]:
    """Documents by length, in bins that double: [1, 2), [2, 4), [4, 8) … tokens."""
    bins = np.bincount([int(length).bit_length() for length in lengths])
    return [
        {"from": 1 << (bits - 1) if bits else 0, "below": 1 << bits, "documents": int(count)}
        for bits, count in enumerate(bins)
        if count
    ]


def sample_window(
    folder: str | Path, split: str = "train", sequence: int = 256, index: int = 0
) -> dict[str, Any]:
    """One training window as token ids and as text."""
    dataset = TokenDataset(folder, split, sequence)
    tokenizer = Tokenizer.load(Path(folder) / "tokenizer")
    window = dataset.window(index % len(dataset))
    return {
        "sample": dataset.sample_name(index % len(dataset)),
        "windows": len(dataset),
        "tokens": [int(token) for token in window],
        "text": tokenizer.decode(window),
    }
