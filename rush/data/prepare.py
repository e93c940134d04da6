"""Tokenize a source into shards, in parallel; an interrupted preparation resumes.

`Preparation` determines the result, and its fingerprint names the folder: a changed source, tokenizer or split is prepared
again, an unchanged one is found. The source is divided into units (`sources.plan_units`), and each finished unit leaves a
record. A killed preparation resumes with the others. The manifest is written last, from the records: without it the folder
does not count as prepared.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rush.data.holdout import share_that_holds, split_of
from rush.data.preparation_unit import UnitJob, read_record, run_unit
from rush.data.published_tokenizers import find_tokenizer
from rush.data.shards import SPLITS, Manifest, Shard, token_dtype, verify_shards, write_manifest
from rush.data.sources import Unit, describe_source, plan_units, read_unit
from rush.data.storage import prepared_folder, preparing
from rush.data.tokenizer import Tokenizer, train_bpe
from rush.data.worker_pool import check_workers, run_each
from rush.errors import DataError, RecipeError
from rush.files import remove_temporaries


@dataclass(frozen=True)
class Preparation:
    """What to prepare. `vocab_size` is that of the tokenizer to train, or the model's limit for an existing one."""

    source: str = "python-stdlib"
    files: tuple[str, ...] = ()
    text_field: str = "text"
    limit: int | None = None  # documents
    tokenizer: str = "train"
    vocab_size: int | None = None
    validation: float = 0.01  # the fraction of documents held out
    seed: int = 0
    tokenizer_bytes: int = 64 << 20  # text a trained tokenizer is trained on

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise RecipeError(
                f"data.validation is {self.validation}; it is a fraction: at least 0, less than 1."
            )
        if self.tokenizer == "train" and self.vocab_size is None:
            raise RecipeError("data.tokenizer is 'train', which needs a vocabulary size.")

    def units(self) -> list[Unit]:
        return plan_units(self.source, self.files, self.text_field, self.limit)

    def describe(self) -> dict[str, Any]:
        described = describe_source(self.source, self.files, self.text_field, self.limit)
        return {"source": described, "validation": self.validation, "seed": self.seed}


@dataclass(frozen=True)
class Progress:
    units: int
    total_units: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class Workspace:
    """A preparation in progress: its folder, its tokenizer (saved there) and its units."""

    folder: Path
    key: str
    described: dict[str, Any]
    tokenizer: Tokenizer
    vocab_size: int
    jobs: tuple[UnitJob, ...]

    def missing(self) -> list[UnitJob]:
        return [job for job in self.jobs if not job.done]


def prepare(
    preparation: Preparation,
    cache: str | Path,
    *,
    workers: int | None = None,
    progress: Callable[[Progress], None] | None = None,
    force: bool = False,
    wait: bool = True,
) -> Path:
    """The folder of the prepared data, prepared now if necessary. The same bytes for any number of workers.

    `wait` for another process that prepares the same folder, or refuse. `force` prepares it again.
    """
    check_workers(workers)
    key, tokenizer = fingerprint(preparation)
    folder = prepared_folder(preparation.source, cache, key)
    with preparing(folder, force=force, wait=wait) as missing:
        if missing:
            workspace = open_workspace(preparation, folder, key, tokenizer)
            _run(workspace, workers or os.cpu_count() or 1, progress)
            finish(workspace)
    verify_shards(folder)
    return folder


def fingerprint(preparation: Preparation) -> tuple[str, Tokenizer | None]:
    """The key of all that determines the content, and the tokenizer unless it is to be trained."""
    described: dict[str, Any] = preparation.describe()
    limit = preparation.vocab_size
    if preparation.tokenizer == "train":
        tokenizer = None
        described["train"] = [limit, preparation.tokenizer_bytes]
    else:
        tokenizer = find_tokenizer(preparation.tokenizer)
        described["tokenizer"] = [tokenizer.sha256, tokenizer.eos_id, limit]
        if limit is not None and tokenizer.vocab_size > limit:
            raise DataError(
                f"The tokenizer {preparation.tokenizer} has {tokenizer.vocab_size} entries, more than the "
                f"vocabulary of {limit}. Choose a model with at least that vocabulary, or another tokenizer."
            )
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest(), tokenizer


def open_workspace(
    preparation: Preparation, folder: Path, key: str, tokenizer: Tokenizer | None
) -> Workspace:
    """Remove temporary files, find or train the tokenizer, plan the units. The caller holds the folder's lock."""
    remove_temporaries(folder, deep=True)
    units = preparation.units()
    share = _held_out_share(preparation, units)
    if tokenizer is None:
        tokenizer = saved_or_trained(
            folder, _training_texts(preparation, units, share), preparation.vocab_size
        )
    tokenizer.save(folder / "tokenizer")
    (folder / "units").mkdir(exist_ok=True)
    vocab_size = preparation.vocab_size or tokenizer.vocab_size
    jobs = tuple(
        UnitJob(folder, unit, preparation.text_field, share, preparation.seed, vocab_size) for unit in units
    )
    one = {} if share == preparation.validation else {"held_out_share": share}
    return Workspace(folder, key, preparation.describe() | one, tokenizer, vocab_size, jobs)


def _held_out_share(preparation: Preparation, units: list[Unit]) -> float:
    """The share of documents to hold out, enough for one. (A stream of the hub is not read twice for it.)"""
    if any(piece.kind == "hub" for unit in units for piece in unit.slices):
        return preparation.validation
    texts = (document.text for unit in units for document in read_unit(unit, preparation.text_field))
    return share_that_holds(texts, preparation.seed, preparation.validation)


def saved_or_trained(
    folder: Path, texts: Iterable[str], vocab_size: int | None, max_bytes: int | None = None
) -> Tokenizer:
    """The tokenizer that an interrupted preparation trained, or one trained now."""
    saved = folder / "tokenizer"
    if (saved / "tokenizer_config.json").is_file():
        return Tokenizer.load(saved)
    assert vocab_size is not None
    return train_bpe(texts, vocab_size, max_bytes)


def _training_texts(preparation: Preparation, units: list[Unit], held_out: float) -> Iterator[str]:
    """Training documents, the same number of bytes from every unit: the first files are not representative."""
    part = preparation.tokenizer_bytes // len(units)
    for unit in units:
        used = 0
        for document in read_unit(unit, preparation.text_field):
            if split_of(document.text, preparation.seed, held_out) == "train":
                yield document.text
                used += len(document.text.encode())
            if used >= part:
                break


def _run(workspace: Workspace, workers: int, progress: Callable[[Progress], None] | None) -> None:
    missing = workspace.missing()
    written = [shard for job in workspace.jobs if job not in missing for shard in read_record(job)]
    done = len(workspace.jobs) - len(missing)
    _report(progress, done, len(workspace.jobs), written)
    for shards in run_each(run_unit, missing, workers):
        done += 1
        written.extend(shards)
        _report(progress, done, len(workspace.jobs), written)


def _report(progress: Callable[[Progress], None] | None, done: int, total: int, written: list[Shard]) -> None:
    if progress is not None:
        documents = sum(shard.documents for shard in written)
        progress(Progress(done, total, documents, sum(shard.tokens for shard in written)))


def finish(workspace: Workspace) -> Manifest:
    """Write the manifest from the records; the folder then counts as prepared."""
    missing = workspace.missing()
    if missing:
        raise DataError(
            f"{len(missing)} of {len(workspace.jobs)} units are not prepared (the first is "
            f"{missing[0].unit.slices[0].path}). Run the preparation again; finished units are kept."
        )
    units = [read_record(job) for job in workspace.jobs]
    shards = tuple(shard for split in SPLITS for unit in units for shard in unit if shard.split == split)
    if not shards:
        raise DataError("The corpus is empty: no document holds any text.")
    manifest = Manifest(
        dtype=token_dtype(workspace.vocab_size).str,
        vocab_size=workspace.vocab_size,
        eos_id=workspace.tokenizer.eos_id,
        tokenizer_sha256=workspace.tokenizer.sha256,
        key=workspace.key,
        preparation=workspace.described,
        shards=shards,
    )
    write_manifest(workspace.folder, manifest)
    shutil.rmtree(workspace.folder / "units")
    return manifest
