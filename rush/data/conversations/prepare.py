"""Encode rows of fine-tuning data into documents on disk: the same bytes for any number of workers.

`DocumentPreparation` determines the result, and its fingerprint names the folder. Each finished unit of rows leaves a record,
so a killed preparation resumes; the manifest is written last.

No row is dropped silently. A bad row is refused with its file and line, or, with `bad_rows="drop"`, dropped and counted by
reason; `too_long` is the policy for rows longer than the sequence. An unreadable file or a broken template always stops the
preparation.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rush.data.conversations.documents_manifest import (
    VERSION,
    Counts,
    DocumentManifest,
    DocumentShard,
    verify_documents,
    write_document_manifest,
)
from rush.data.conversations.filtering import group_of_row, read_row, split_of_row, write_row
from rush.data.conversations.preparation import DocumentPreparation
from rush.data.conversations.rows import Row, plan_rows, read_unit_rows
from rush.data.conversations.store import DocumentWriter
from rush.data.conversations.templates import Template, find_template
from rush.data.conversations.turns import BadRow, Conversation, Sample, Text
from rush.data.holdout import share_that_holds
from rush.data.preparation_unit import cached_tokenizer
from rush.data.prepare import Progress, saved_or_trained
from rush.data.published_tokenizers import find_tokenizer
from rush.data.shards import SPLITS, token_dtype
from rush.data.sources import Unit
from rush.data.storage import prepared_folder, preparing
from rush.data.tokenizer import Tokenizer
from rush.data.worker_pool import check_workers, run_each
from rush.errors import DataError
from rush.files import remove_temporaries, write_atomic

Units = list[tuple[Unit, int | None]]


@dataclass(frozen=True)
class _Job:
    """One unit of work, with all that a worker process needs."""

    folder: Path
    unit: Unit
    take: int | None
    preparation: DocumentPreparation
    template: Template
    vocab_size: int

    @property
    def name(self) -> str:
        return f"{self.unit.index:05d}"

    @property
    def record(self) -> Path:
        return self.folder / "units" / f"{self.name}.json"


@dataclass(frozen=True)
class _UnitResult:
    """The shards of a unit, and the counts of each split."""

    shards: tuple[DocumentShard, ...]
    counts: dict[str, Counts]

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of_json(cls, text: bytes) -> _UnitResult:
        body = json.loads(text)
        shards = tuple(DocumentShard(**shard) for shard in body["shards"])
        return cls(shards, {split: Counts(**counts) for split, counts in body["counts"].items()})


def prepare_documents(
    preparation: DocumentPreparation,
    cache: str | Path,
    progress: Callable[[Progress], None] | None = None,
    *,
    workers: int | None = None,
    force: bool = False,
) -> Path:
    """The folder of the prepared documents, prepared now if necessary. `force` prepares them again."""
    check_workers(workers)
    key, tokenizer, template = _fingerprint(preparation)
    folder = prepared_folder(preparation.source, cache, key)
    with preparing(folder, force=force) as missing:
        if missing:
            jobs, tokenizer = _open(preparation, folder, tokenizer, template)
            _run(jobs, workers or os.cpu_count() or 1, progress)
            _finish(folder, key, preparation, jobs, tokenizer)
    verify_documents(folder)
    return folder


def _fingerprint(preparation: DocumentPreparation) -> tuple[str, Tokenizer | None, Template | None]:
    """The key of all that determines the content; tokenizer and template unless the tokenizer is to be trained."""
    described: dict[str, Any] = preparation.describe() | {"version": VERSION}
    limit = preparation.vocab_size
    if preparation.tokenizer == "train":
        described["train"] = [limit, preparation.tokenizer_bytes, preparation.template]
        tokenizer, template = None, None
    else:
        tokenizer = find_tokenizer(preparation.tokenizer)
        template = find_template(preparation.template, tokenizer)
        described["tokenizer"] = [tokenizer.sha256, tokenizer.eos_token, tokenizer.bos_token, limit]
        described["template"] = template.source
        if limit is not None and tokenizer.vocab_size > limit:
            raise DataError(
                f"The tokenizer {preparation.tokenizer} has {tokenizer.vocab_size:,} entries, more than the model's "
                f"vocabulary of {limit:,}: it is not this model's. Set data.tokenizer to the model's own."
            )
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest(), tokenizer, template


def _open(
    preparation: DocumentPreparation, folder: Path, tokenizer: Tokenizer | None, template: Template | None
) -> tuple[list[_Job], Tokenizer]:
    """Remove temporary files, find or train the tokenizer, plan the units. The caller holds the folder's lock."""
    remove_temporaries(folder, deep=True)
    units = plan_rows(preparation.source, preparation.files, preparation.limit)
    preparation = replace(preparation, validation=_held_out_share(preparation, units))
    if tokenizer is None:
        texts = _training_texts(preparation, units)
        tokenizer = saved_or_trained(folder, texts, preparation.vocab_size, preparation.tokenizer_bytes)
        template = find_template(preparation.template, tokenizer)
    assert template is not None
    # Saved with the chat template of the training data, for inference.
    tokenizer = replace(tokenizer, chat_template=template.source)
    tokenizer.save(folder / "tokenizer")
    (folder / "units").mkdir(exist_ok=True)
    vocab_size = preparation.vocab_size or tokenizer.vocab_size
    return [_Job(folder, unit, take, preparation, template, vocab_size) for unit, take in units], tokenizer


def _training_texts(preparation: DocumentPreparation, units: Units) -> Iterator[str]:
    """The texts of the training rows."""
    for row, sample in _good_rows(preparation, units):
        if split_of_row(row, sample, preparation) != "train":
            continue
        if isinstance(sample, Text):
            yield sample.text
        else:
            turns = sample.turns if isinstance(sample, Conversation) else sample.prompt + sample.chosen
            yield "\n".join(turn.content for turn in turns)


def _good_rows(preparation: DocumentPreparation, units: Units) -> Iterator[tuple[Row, Sample]]:
    """The rows that can be read; the others are reported when they are encoded."""
    for unit, take in units:
        for row in read_unit_rows(preparation.source, unit, take):
            with contextlib.suppress(BadRow):
                yield row, read_row(row, preparation)[1]


def _held_out_share(preparation: DocumentPreparation, units: Units) -> float:
    """The share of rows to hold out, enough for one question. (A stream of the hub is not read twice for it.)"""
    if any(piece.kind == "hub" for unit, _ in units for piece in unit.slices):
        return preparation.validation
    groups = (group_of_row(row, sample) for row, sample in _good_rows(preparation, units))
    return share_that_holds(groups, preparation.seed, preparation.validation)


def _run(jobs: list[_Job], workers: int, progress: Callable[[Progress], None] | None) -> None:
    missing = [job for job in jobs if not job.record.is_file()]
    done = len(jobs) - len(missing)
    documents = tokens = 0
    for finished in run_each(run_documents, missing, workers):
        done += 1
        documents += sum(shard.documents for shard in finished.shards)
        tokens += sum(shard.tokens for shard in finished.shards)
        if progress is not None:
            progress(Progress(done, len(jobs), documents, tokens))


def run_documents(job: _Job) -> _UnitResult:
    """Encode the rows of one unit, write its shards, then its record."""
    tokenizer = cached_tokenizer(job.folder / "tokenizer")
    writers = {split: DocumentWriter(job.folder, split, job.name, job.vocab_size) for split in SPLITS}
    for row in read_unit_rows(job.preparation.source, job.unit, job.take):
        write_row(row, job.preparation, tokenizer, job.template, writers)
    shards = tuple(shard for split in SPLITS if (shard := writers[split].finish()) is not None)
    finished = _UnitResult(shards, {split: writer.counts for split, writer in writers.items()})
    write_atomic(job.record, finished.to_json())
    return finished


def _finish(
    folder: Path, key: str, preparation: DocumentPreparation, jobs: list[_Job], tokenizer: Tokenizer
) -> None:
    """Write the manifest from the records; the folder then counts as prepared."""
    units = [_UnitResult.of_json(job.record.read_bytes()) for job in jobs]
    counts = {split: Counts() for split in SPLITS}
    for unit in units:
        counts = {split: counts[split].plus(unit.counts[split]) for split in SPLITS}
    vocab_size = preparation.vocab_size or tokenizer.vocab_size
    share = jobs[0].preparation.validation
    one = {} if share == preparation.validation else {"held_out_share": share}
    manifest = DocumentManifest(
        dtype=token_dtype(vocab_size).str,
        vocab_size=vocab_size,
        eos_id=tokenizer.eos_id,
        tokenizer_sha256=tokenizer.sha256,
        key=key,
        preparation=preparation.describe() | {"template": jobs[0].template.name} | one,
        paired=preparation.paired,
        counts=counts,
        shards=tuple(
            shard for split in SPLITS for unit in units for shard in unit.shards if shard.split == split
        ),
    )
    if not manifest.shards:
        raise DataError(f"There is nothing to train on: no row is left. {manifest.losses()}".rstrip())
    if not manifest.trained("train"):
        raise DataError(
            f"There is nothing to train on: all {manifest.total.documents:,} documents are held out "
            f"(data.validation = {preparation.validation}). {manifest.losses()}".rstrip()
        )
    write_document_manifest(folder, manifest)
    shutil.rmtree(folder / "units")
