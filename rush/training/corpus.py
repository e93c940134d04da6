"""The data of a recipe, prepared once and cached.

Pretraining reads windows of one token stream; fine-tuning reads documents, each with its own labels. Both are a `Corpus`,
which has a loader and held-out batches.
"""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from rush.data import (
    Batch,
    Loader,
    Preparation,
    Steps,
    TokenDataset,
    Tokenizer,
    prepare,
    progress_bar,
    read_manifest,
    validation_batches,
)
from rush.data.conversations import (
    DocumentPreparation,
    DocumentSet,
    prepare_documents,
    read_document_manifest,
)
from rush.data.document_loader import DocumentLoader, document_validation, largest_batch
from rush.data.holdout import held_out_note
from rush.data.loader import make_batch
from rush.data.packing import Concat, Pad
from rush.data.published_tokenizers import find_tokenizer
from rush.errors import DataError, RecipeError
from rush.files import cache_folder
from rush.hub.remote import local_folder
from rush.recipe import Recipe
from rush.records.run_folder import RunFolder
from rush.training.build import Run
from rush.training.reference import references, set_live_reference, wants_cached

Note = Callable[[str], None]
Split = Literal["train", "validation"]
TRIAL_PAIRS = 256
"""Pairs that a trial reads: the reference pass over all of them would take longer than the trial."""


@dataclass(frozen=True)
class Corpus(ABC):
    folder: Path
    tokenizer: Tokenizer
    digest: str
    """Digest of the tokens; a resumed run must find the same."""

    @abstractmethod
    def loader(self, recipe: Recipe, options: Mapping[str, Any], *, same_samples: int | None = None) -> Steps:
        """The training samples in the run's order; techniques set `options`.

        With `same_samples` every step holds that many documents, the same ones whatever the packing.
        """

    @abstractmethod
    def validation(self, recipe: Recipe, options: Mapping[str, Any]) -> Iterator[Batch]:
        """The held-out batches, the same ones every time."""

    @abstractmethod
    def largest(self, recipe: Recipe, options: Mapping[str, Any], split: Split = "train") -> Batch:
        """The micro batch of the split that takes most memory."""

    def ready_for(
        self, run: Run, weights: dict[str, torch.Tensor] | None, beside: Path | None, *, resumed: bool = False
    ) -> Corpus:
        """The corpus with the reference's log-probabilities, for preferences. They are kept in the folder `beside`; a trial has
        none, and reads only the first pairs."""
        return self


@dataclass(frozen=True)
class TokenCorpus(Corpus):
    """A token stream, read in windows."""

    def loader(
        self, recipe: Recipe, options: Mapping[str, Any], *, same_samples: int | None = None
    ) -> Loader:
        return Loader(
            TokenDataset(self.folder, "train", recipe.batch.sequence),
            samples_per_step=recipe.step_tokens // recipe.batch.sequence,
            micro=recipe.micro,
            seed=recipe.run.seed,
            shuffle=recipe.data.shuffle,
            **options,
        )

    def validation(self, recipe: Recipe, options: Mapping[str, Any]) -> Iterator[Batch]:
        dataset = TokenDataset(self.folder, "validation", recipe.batch.sequence)
        return validation_batches(
            dataset, recipe.micro, samples=recipe.run.validate_sequences, **_place(options)
        )

    def largest(self, recipe: Recipe, options: Mapping[str, Any], split: Split = "train") -> Batch:
        dataset = TokenDataset(self.folder, split, recipe.batch.sequence)
        # All have the same size.
        return make_batch(dataset, [index % len(dataset) for index in range(recipe.micro)])


@dataclass(frozen=True)
class DocumentCorpus(Corpus):
    """Documents with labels; for preferences in pairs, with the reference's log-probabilities."""

    references: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    most: int | None = None
    """MemoryLimit on the documents to train on."""

    def loader(
        self, recipe: Recipe, options: Mapping[str, Any], *, same_samples: int | None = None
    ) -> DocumentLoader:
        return DocumentLoader(
            DocumentSet(self.folder, "train", self.most),
            micro=recipe.micro,
            sequence=recipe.batch.sequence,
            batches_per_step=recipe.accumulation * recipe.data_ranks,
            seed=recipe.run.seed,
            shuffle=recipe.data.shuffle,
            paired=recipe.objective.kind == "dpo",
            references=self.references.get("train"),
            documents_per_step=same_samples,
            **options,
        )

    def validation(self, recipe: Recipe, options: Mapping[str, Any]) -> Iterator[Batch]:
        documents = DocumentSet(self.folder, "validation")
        return document_validation(
            documents,
            options.get("packing"),
            recipe.micro,
            recipe.batch.sequence,
            recipe.run.validate_sequences,
            paired=recipe.objective.kind == "dpo",
            references=self.references.get("validation"),
            **_place(options),
        )

    def largest(self, recipe: Recipe, options: Mapping[str, Any], split: Split = "train") -> Batch:
        packing = options.get("packing")
        return largest_batch(
            DocumentSet(self.folder, split),
            Pad() if split == "validation" and isinstance(packing, Concat) else packing,
            recipe.micro,
            recipe.batch.sequence,
            paired=recipe.objective.kind == "dpo",
        )

    def ready_for(
        self, run: Run, weights: dict[str, torch.Tensor] | None, beside: Path | None, *, resumed: bool = False
    ) -> Corpus:
        set_live_reference(run, weights)
        if not wants_cached(run):
            return self
        most = None if beside else 2 * TRIAL_PAIRS
        splits: dict[str, tuple[DocumentSet, int | None]] = {
            "train": (DocumentSet(self.folder, "train", most), None)
        }
        if beside:
            validated = run.recipe.run.validate_sequences
            splits["validation"] = DocumentSet(self.folder, "validation"), validated
        with nullcontext(beside) if beside else tempfile.TemporaryDirectory() as folder:
            found = references(run, splits, self.digest, Path(folder), resumed=resumed)
        return replace(self, references=found, most=most)


def _place(options: Mapping[str, Any]) -> dict[str, int]:
    """This rank's index and the world size, for the held-out batches."""
    return {"rank": options.get("rank", 0), "world": options.get("world", 1)}


def preparation_of(recipe: Recipe) -> Preparation:
    data = recipe.data
    return Preparation(
        source=data.source,
        files=tuple(data.files),
        text_field=data.text_field,
        limit=data.limit,
        tokenizer=data.tokenizer,
        vocab_size=data.vocab_size or recipe.shape().vocab_size,
        validation=data.validation,
    )


def documents_of(recipe: Recipe) -> DocumentPreparation:
    """The documents of a fine-tuning recipe."""
    data = recipe.data
    return DocumentPreparation(
        source=data.source,
        files=tuple(data.files),
        format=data.format,
        template=data.template,
        train_on=recipe.objective.train_on,
        too_long=data.too_long,
        sequence=recipe.batch.sequence,
        tokenizer=_tokenizer_of(recipe),
        vocab_size=data.vocab_size or recipe.shape().vocab_size,
        validation=data.validation,
        limit=data.limit,
        paired=recipe.objective.kind == "dpo",
        text_field=data.text_field,
        bad_rows=data.bad_rows,
    )


def _tokenizer_of(recipe: Recipe) -> str:
    """The tokenizer of a fine-tuned model: that of the base, unless the recipe names one."""
    base, asked = recipe.model.init_from, recipe.data.tokenizer
    if asked == "model":
        if base is None:
            raise RecipeError(
                "data.tokenizer is 'model', but model.init_from names no model to take it from; set model.init_from, or "
                "data.tokenizer=train to start from random weights."
            )
        run = RunFolder(local_folder(base))
        return str(run.tokenizer if run.tokenizer.is_dir() else run.path)
    if asked == "train" and base is not None:
        raise RecipeError(
            f"data.tokenizer is 'train', but the weights of {base} only fit their own tokenizer; set data.tokenizer=model."
        )
    if asked != "train":
        _check_tokenizer(recipe, find_tokenizer(asked))
    return asked


def _check_tokenizer(recipe: Recipe, named: Tokenizer) -> None:
    """Refuse a tokenizer that differs from that of the starting weights, where they have one."""
    base = recipe.model.init_from
    if base is None:
        return
    run = RunFolder(local_folder(base))
    own = run.tokenizer if run.tokenizer.is_dir() else run.path
    if not (own / "tokenizer.json").is_file():
        return
    if (why := Tokenizer.load(own).difference(named)) is not None:
        instead = "model" if recipe.objective.kind != "lm" else own
        raise DataError(
            f"data.tokenizer = {recipe.data.tokenizer!r} is not the tokenizer of the weights of {base}: {why}; set "
            f"data.tokenizer={instead}."
        )


def open_corpus(recipe: Recipe, tokenizer_folder: Path | None, note: Note) -> Corpus:
    """Prepare the recipe's corpus (with a progress bar) or open the cached one; save its tokenizer with the run."""
    corpus = _open_tokens(recipe, note) if recipe.objective.kind == "lm" else _open_documents(recipe, note)
    if tokenizer_folder is not None:
        corpus.tokenizer.save(tokenizer_folder)
    return corpus


def _open_tokens(recipe: Recipe, note: Note) -> TokenCorpus:
    if recipe.model.init_from and recipe.data.tokenizer != "train":
        _check_tokenizer(recipe, find_tokenizer(recipe.data.tokenizer))
    folder = prepare_with_bar(preparation_of(recipe))
    tokenizer = Tokenizer.load(folder / "tokenizer")
    _check_tokenizer(recipe, tokenizer)
    manifest = read_manifest(folder)
    note(
        f"Corpus: {manifest.documents('train'):,} documents, {manifest.tokens('train'):,} tokens to train on; "
        f"{manifest.tokens('validation'):,} tokens held out ({folder}). {held_out_note(manifest.preparation)}".rstrip()
    )
    return TokenCorpus(folder, tokenizer, manifest.content_sha256)


def _open_documents(recipe: Recipe, note: Note) -> DocumentCorpus:
    with progress_bar() as show:
        folder = prepare_documents(documents_of(recipe), cache_folder() / "documents", show)
    manifest = read_document_manifest(folder)
    lost = " ".join(filter(None, (held_out_note(manifest.preparation), manifest.losses())))
    note(
        f"Documents: {manifest.documents('train'):,} to train on, {manifest.trained('train'):,} of their "
        f"{manifest.tokens('train'):,} tokens targets; {manifest.documents('validation'):,} held out ({folder})."
        + (f" {lost}" if lost else "")
    )
    return DocumentCorpus(folder, Tokenizer.load(folder / "tokenizer"), manifest.content_sha256)


def prepare_with_bar(preparation: Preparation, **options: Any) -> Path:
    """`prepare`, with a progress bar on a terminal."""
    with progress_bar() as show:
        return prepare(preparation, cache_folder() / "corpora", progress=show, **options)


def prepare_on(executor: str, preparation: Preparation, **options: Any) -> Path:
    """The same preparation as a datatrove pipeline: `local`, `slurm` or `ray`."""
    from rush.data.pipeline import prepare_pipeline

    return prepare_pipeline(preparation, cache_folder() / "corpora", executor=executor, **options)
