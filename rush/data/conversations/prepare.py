"""From rows to documents on disk: prepared once, found again, the same bytes for any number of workers.

Everything that determines the result is in `DocumentPreparation`; its fingerprint names the folder. A unit of
rows that is done leaves a record, so a killed preparation continues, and the manifest is written at the end.

What cannot be trained on is never passed over in silence. A row that is not what it should be is refused with
its file and line, or, with `bad_rows="drop"`, left out and counted by reason. So is a conversation longer than
the sequence, by a policy of its own. A file that cannot be read, or a template that does not work, always
stops the preparation: that is no matter of single rows.
"""

from __future__ import annotations

import functools
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
from rush.data.conversations.filtering import read_row, split_of_row, write_row
from rush.data.conversations.preparation import DocumentPreparation
from rush.data.conversations.rows import plan_rows, read_unit_rows
from rush.data.conversations.store import DocumentWriter
from rush.data.conversations.templates import Template, find_template
from rush.data.conversations.turns import BadRow, Conversation, Text
from rush.data.prepare import Progress
from rush.data.published_tokenizers import find_tokenizer
from rush.data.shards import SPLITS, token_dtype
from rush.data.sources import Unit
from rush.data.storage import folder_lock, writable
from rush.data.tokenizer import Tokenizer, train_bpe
from rush.data.worker_pool import run_each
from rush.errors import DataError, RecipeError
from rush.files import remove_temporaries, write_atomic


@dataclass(frozen=True)
class _Job:
    """One unit of work, with all that a worker process needs to know."""

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
class _Done:
    """What a unit left: its shards, and the counts of each split."""

    shards: tuple[DocumentShard, ...]
    counts: dict[str, Counts]

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of_json(cls, text: bytes) -> _Done:
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
    """Prepare, or find prepared, and return the folder. `force` throws away what is there."""
    if workers is not None and workers < 1:
        raise RecipeError(f"The number of workers is {workers}; it must be at least 1.")
    key, tokenizer, template = _fingerprint(preparation)
    label = preparation.source.removeprefix("hub:").strip("/").replace("/", "-").replace(":", "-")
    folder = Path(cache).absolute() / f"{label}-{key[:16]}"
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(folder, wait=True):
            if force:
                _clear(folder)
            if not (folder / "manifest.json").is_file():
                jobs, tokenizer = _open(preparation, folder, tokenizer, template)
                _run(jobs, workers or os.cpu_count() or 1, progress)
                _finish(folder, key, preparation, jobs, tokenizer)
    verify_documents(folder)
    return folder


def _fingerprint(preparation: DocumentPreparation) -> tuple[str, Tokenizer | None, Template | None]:
    """The key of all that determines the content; tokenizer and template unless they have to be made first."""
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
    """Sweep leftovers, settle the tokenizer, plan the units. Call it while holding the folder's lock."""
    remove_temporaries(folder, deep=True)
    units = plan_rows(preparation.source, preparation.files, preparation.limit)
    saved = folder / "tokenizer"
    if tokenizer is None:
        if (saved / "tokenizer_config.json").is_file():
            tokenizer = Tokenizer.load(saved)
        else:
            assert preparation.vocab_size is not None
            texts = _training_texts(preparation, units)
            tokenizer = train_bpe(texts, preparation.vocab_size, preparation.tokenizer_bytes)
        template = find_template(preparation.template, tokenizer)
    assert template is not None
    # Kept with the template that was used, so that whoever talks to the model writes as it was taught.
    tokenizer = replace(tokenizer, chat_template=template.source)
    tokenizer.save(saved)
    (folder / "units").mkdir(exist_ok=True)
    vocab_size = preparation.vocab_size or tokenizer.vocab_size
    return [_Job(folder, unit, take, preparation, template, vocab_size) for unit, take in units], tokenizer


def _training_texts(preparation: DocumentPreparation, units: list[tuple[Unit, int | None]]) -> Iterator[str]:
    """What the turns of the training rows say."""
    for unit, take in units:
        for row in read_unit_rows(preparation.source, unit, take):
            try:
                _, sample, _ = read_row(row, preparation)
            except BadRow:
                continue  # it is judged when it is encoded
            if split_of_row(row, sample, preparation) != "train":
                continue
            if isinstance(sample, Text):
                yield sample.text
            else:
                turns = sample.turns if isinstance(sample, Conversation) else sample.prompt + sample.chosen
                yield "\n".join(turn.content for turn in turns)


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


def run_documents(job: _Job) -> _Done:
    """Encode the rows of one unit, write its shards, then its record."""
    tokenizer = _load_once(job.folder / "tokenizer")
    writers = {split: DocumentWriter(job.folder, split, job.name, job.vocab_size) for split in SPLITS}
    for row in read_unit_rows(job.preparation.source, job.unit, job.take):
        write_row(row, job.preparation, tokenizer, job.template, writers)
    shards = tuple(shard for split in SPLITS if (shard := writers[split].finish()) is not None)
    finished = _Done(shards, {split: writer.counts for split, writer in writers.items()})
    write_atomic(job.record, finished.to_json())
    return finished


@functools.lru_cache(maxsize=1)
def _load_once(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def _finish(
    folder: Path, key: str, preparation: DocumentPreparation, jobs: list[_Job], tokenizer: Tokenizer
) -> None:
    """Gather the records into the manifest; from here on the folder counts as prepared."""
    units = [_Done.of_json(job.record.read_bytes()) for job in jobs]
    counts = {split: Counts() for split in SPLITS}
    for unit in units:
        counts = {split: counts[split].plus(unit.counts[split]) for split in SPLITS}
    vocab_size = preparation.vocab_size or tokenizer.vocab_size
    manifest = DocumentManifest(
        dtype=token_dtype(vocab_size).str,
        vocab_size=vocab_size,
        eos_id=tokenizer.eos_id,
        tokenizer_sha256=tokenizer.sha256,
        key=key,
        preparation=preparation.describe() | {"template": jobs[0].template.name},
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


def _clear(folder: Path) -> None:
    """Forget a prepared folder. The manifest goes first: what is left is at worst unfinished."""
    (folder / "manifest.json").unlink(missing_ok=True)
    for name in ("units", "tokenizer", *SPLITS):
        shutil.rmtree(folder / name, ignore_errors=True)
