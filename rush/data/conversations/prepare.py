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

from rush.data.conversations.encode import Encoded, encode
from rush.data.conversations.formats import FORMATS, detect, read_sample
from rush.data.conversations.rows import Row, describe_rows, plan_rows, read_unit_rows
from rush.data.conversations.store import (
    Counts,
    DocumentManifest,
    DocumentShard,
    DocumentWriter,
    verify_documents,
    write_document_manifest,
)
from rush.data.conversations.templates import Template, find_template
from rush.data.conversations.turns import BadRow, Conversation, Pair, Sample, Text
from rush.data.pool import run_each
from rush.data.prepare import Progress
from rush.data.published import find_tokenizer
from rush.data.shards import SPLITS, token_dtype
from rush.data.sources import Unit
from rush.data.storage import folder_lock, writable
from rush.data.tokenizer import Tokenizer, train_bpe
from rush.data.units import split_of
from rush.errors import DataError, RecipeError, nearest
from rush.files import remove_temporaries, write_atomic

TOO_LONG = ("error", "drop", "cut")
BAD_ROWS = ("error", "drop")


@dataclass(frozen=True)
class DocumentPreparation:
    """What to prepare. `vocab_size` is the model's; with `tokenizer="train"`, the size to train."""

    source: str = "python-docstrings"
    files: tuple[str, ...] = ()
    format: str = "auto"
    template: str = "auto"
    train_on: str = "completion"
    too_long: str = "error"
    sequence: int = 1024
    tokenizer: str = "train"
    vocab_size: int | None = None
    validation: float = 0.01
    limit: int | None = None
    paired: bool = False
    text_field: str = "text"
    bad_rows: str = "error"
    seed: int = 0
    tokenizer_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        choices = {
            "data.format": (self.format, ("auto", *FORMATS)),
            "data.too_long": (self.too_long, TOO_LONG),
            "data.bad_rows": (self.bad_rows, BAD_ROWS),
            "objective.train_on": (self.train_on, ("completion", "all")),
        }
        for key, (found, allowed) in choices.items():
            if found not in allowed:
                raise RecipeError(f"{key} is {found!r}; {nearest(found, allowed)}")
        if self.paired and self.format not in ("auto", "preference"):
            raise RecipeError(
                f"data.format is {self.format!r}, but preferences (objective.kind = 'dpo') need pairs of answers: "
                "set data.format to 'preference' or 'auto'."
            )
        if not self.paired and self.format == "preference":
            raise RecipeError(
                "data.format is 'preference', which is for objective.kind = 'dpo'; set the objective, or another format."
            )
        if not 0 <= self.validation < 1:
            raise RecipeError(
                f"data.validation is {self.validation}; it is a fraction: at least 0, less than 1."
            )
        if self.limit is not None and self.limit < 1:
            raise RecipeError(
                f"data.limit is {self.limit}; it counts rows and must be at least 1, or be left out."
            )
        if self.sequence < 2:
            raise RecipeError(f"batch.sequence is {self.sequence}; a conversation needs at least 2 tokens.")
        if self.tokenizer == "train" and self.vocab_size is None:
            raise RecipeError("data.tokenizer is 'train', which needs a vocabulary size.")

    def describe(self) -> dict[str, Any]:
        """All that determines the documents, but for the tokenizer and its template."""
        asked = asdict(self)
        for name in ("source", "files", "limit", "tokenizer", "vocab_size", "tokenizer_bytes", "template"):
            del asked[name]
        return {"source": describe_rows(self.source, self.files, self.limit), **asked}


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
    described: dict[str, Any] = preparation.describe()
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
                sample = _read(row, preparation)
            except BadRow:
                continue  # it is judged when it is encoded
            if _split(row, sample, preparation) != "train":
                continue
            if isinstance(sample, Text):
                yield sample.text
            else:
                turns = sample.turns if isinstance(sample, Conversation) else sample.prompt + sample.chosen
                yield "\n".join(turn.content for turn in turns)


def _read(row: Row, preparation: DocumentPreparation) -> Sample:
    return read_sample(
        row.values, preparation.format, paired=preparation.paired, text_field=preparation.text_field
    )


def _split(row: Row, sample: Sample | None, preparation: DocumentPreparation) -> str:
    group = row.group or (sample.group if sample is not None else row.name)
    return split_of(group, preparation.seed, preparation.validation)


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
        _write_row(row, job, tokenizer, writers)
    shards = tuple(shard for split in SPLITS if (shard := writers[split].finish()) is not None)
    finished = _Done(shards, {split: writer.counts for split, writer in writers.items()})
    write_atomic(job.record, finished.to_json())
    return finished


@functools.lru_cache(maxsize=1)
def _load_once(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


def _write_row(row: Row, job: _Job, tokenizer: Tokenizer, writers: dict[str, DocumentWriter]) -> None:
    preparation = job.preparation
    sample: Sample | None = None
    try:
        sample = _read(row, preparation)
        encoded = _encode(sample, tokenizer, job.template, preparation.train_on)
        counts = writers[_split(row, sample, preparation)].counts
        kept = _fitting(encoded, preparation, counts)
    except BadRow as bad:
        policy, key = preparation.bad_rows, "data.bad_rows"
        if bad.reason.startswith("too long"):
            policy, key = preparation.too_long, "data.too_long"
        if policy == "error":
            leave = f"set {key} to 'drop' to leave such rows out and count them"
            how = (
                f"mend the row, or {leave}"
                if key == "data.bad_rows"
                else f"raise batch.sequence, or {leave}, or to 'cut'"
            )
            raise DataError(f"{row.name}: {bad}; {how}.") from bad
        counts = writers[_split(row, sample, preparation)].counts
        counts.rows += 1
        counts.drop(bad.reason, row.name)
        return
    except DataError as error:
        raise DataError(f"{row.name}: {error}") from error
    writer = writers[_split(row, sample, preparation)]
    counts.rows += 1
    name = preparation.format if preparation.format != "auto" else detect(
        row.values, paired=preparation.paired, text_field=preparation.text_field
    )  # fmt: skip
    counts.formats[name] = counts.formats.get(name, 0) + 1
    names = (row.name,) if len(kept) == 1 else (f"{row.name} (chosen)", f"{row.name} (rejected)")
    for document, document_name in zip(kept, names, strict=True):
        writer.append(document, document_name)


def _encode(sample: Sample, tokenizer: Tokenizer, template: Template, train_on: str) -> list[Encoded]:
    """One document, or the two of a pair."""
    if not isinstance(sample, Pair):
        return [encode(sample, tokenizer, template, train_on)]
    # Of a pair only what follows the prompt is compared, whatever train_on says.
    pair = [
        encode(conversation, tokenizer, template, prompt_turns=len(sample.prompt))
        for conversation in sample.conversations
    ]
    starts = [document.trained.index(True) for document in pair]
    if starts[0] != starts[1] or pair[0].tokens[: starts[0]] != pair[1].tokens[: starts[1]]:
        raise DataError(
            f"the template ({template.name}) writes the prompt differently before the two answers, so they cannot be "
            "compared. Set data.template to chatml, llama-3 or plain."
        )
    if pair[0].tokens == pair[1].tokens:
        raise BadRow("chosen equals rejected", "chosen and rejected are the same answer")
    return pair


def _fitting(encoded: list[Encoded], preparation: DocumentPreparation, counts: Counts) -> list[Encoded]:
    """The documents, cut to the sequence where that is asked for; both of a pair or neither."""
    longest, limit = max(map(len, encoded)), preparation.sequence
    if longest <= limit:
        return encoded
    if preparation.too_long != "cut":
        raise BadRow("too long", f"{longest:,} tokens, longer than batch.sequence = {limit:,}")
    kept = [Encoded(document.tokens[:limit], document.trained[:limit]) for document in encoded]
    if not all(any(document.trained) for document in kept):
        raise BadRow("too long: no answer left", f"no token of the answer is within the first {limit:,}")
    if len(kept) == 2 and kept[0].tokens == kept[1].tokens:
        raise BadRow("too long: no difference left", f"the two answers differ only after {limit:,} tokens")
    counts.cut += 1
    counts.cut_tokens += sum(map(len, encoded)) - sum(map(len, kept))
    return kept


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
