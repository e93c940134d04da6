"""Text into batches: sources, tokenizers, token shards, and a loader with exact state.

    folder = prepare(Preparation(source="python-stdlib", vocab_size=2048), cache="data")
    dataset = TokenDataset(folder, "train", sequence=256)
    loader = Loader(dataset, samples_per_step=16, micro=4, seed=0)

Modules that need torch are imported on first use: tokenizing workers do not import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rush.data.dataset import TokenDataset
from rush.data.documents import Documents
from rush.data.inspect import corpus_statistics, sample_window
from rush.data.prepare import Preparation, Progress, prepare
from rush.data.progress import progress_bar
from rush.data.published_tokenizers import find_tokenizer
from rush.data.readers import Document
from rush.data.shards import Manifest, read_manifest, verify_shards
from rush.data.sources import describe_source, open_source
from rush.data.tokenizer import Tokenizer, train_bpe

if TYPE_CHECKING:
    from rush.data.batch import Batch
    from rush.data.loader import Loader, Steps, validation_batches

__all__ = [
    "Batch",
    "Document",
    "Documents",
    "Loader",
    "Manifest",
    "Preparation",
    "Progress",
    "Steps",
    "TokenDataset",
    "Tokenizer",
    "corpus_statistics",
    "describe_source",
    "find_tokenizer",
    "open_source",
    "prepare",
    "progress_bar",
    "read_manifest",
    "sample_window",
    "train_bpe",
    "validation_batches",
    "verify_shards",
]


def __getattr__(name: str) -> Any:
    if name in ("Batch", "Loader", "Steps", "validation_batches"):
        from rush.data import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
