"""One unit of preparation: read, split, tokenize, write its shards, then its record.

The split of a document depends on its text and the seed alone (`rush/data/holdout.py`), not on its position or the number of
workers.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from rush.data.holdout import split_of
from rush.data.readers import Document
from rush.data.shards import SPLITS, Shard, shard_writers
from rush.data.sources import Unit, read_unit
from rush.data.tokenizer import Tokenizer
from rush.files import write_atomic

BATCH_DOCUMENTS = 64


@dataclass(frozen=True)
class UnitJob:
    """One unit of work, with all that a worker process or another machine needs."""

    folder: Path
    unit: Unit
    text_field: str
    validation: float
    seed: int
    vocab_size: int

    @property
    def record(self) -> Path:
        return self.folder / "units" / f"{self.unit.index:05d}.json"

    @property
    def done(self) -> bool:
        return self.record.is_file()


def run_unit(job: UnitJob) -> tuple[Shard, ...]:
    tokenizer = cached_tokenizer(job.folder / "tokenizer")
    documents = read_unit(job.unit, job.text_field)
    return write_unit(job, tokenizer.eos_id, encoded_documents(documents, tokenizer))


@functools.lru_cache(maxsize=4)
def cached_tokenizer(folder: str | Path) -> Tokenizer:
    return Tokenizer.load(folder)


def encoded_documents(
    documents: Iterable[Document], tokenizer: Tokenizer
) -> Iterable[tuple[Document, list[int]]]:
    """Documents with their token ids, encoded a batch at a time."""
    documents = iter(documents)
    while batch := list(itertools.islice(documents, BATCH_DOCUMENTS)):
        encoded = tokenizer.encode_documents([document.text for document in batch])
        yield from zip(batch, encoded, strict=True)


def write_unit(
    job: UnitJob, eos_id: int, documents: Iterable[tuple[Document, list[int]]]
) -> tuple[Shard, ...]:
    """Write a unit's documents into its shards, and then its record."""
    with shard_writers(job.folder, f"{job.unit.index:05d}", job.vocab_size, eos_id) as writers:
        for document, ids in documents:
            writer = writers[split_of(document.text, job.seed, job.validation)]
            writer.append(ids, document.id, len(document.text.encode()))
        shards = tuple(shard for split in SPLITS if (shard := writers[split].finish()) is not None)
    write_atomic(job.record, json.dumps([asdict(shard) for shard in shards]).encode())
    return shards


def read_record(job: UnitJob) -> tuple[Shard, ...]:
    return tuple(Shard(**shard) for shard in json.loads(job.record.read_bytes()))
