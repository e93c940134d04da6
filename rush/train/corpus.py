"""The data a recipe names, ready to train on: prepared once, found again afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rush.data import (
    Batch,
    Loader,
    Preparation,
    TokenDataset,
    Tokenizer,
    prepare,
    progress_bar,
    read_manifest,
    validation_batches,
)
from rush.hardware.ceilings import cache_folder
from rush.recipe import Recipe


@dataclass(frozen=True)
class Corpus:
    folder: Path
    tokenizer: Tokenizer
    digest: str
    """Names the tokens themselves; a resumed run must find the same."""

    def loader(self, recipe: Recipe, options: dict[str, Any]) -> Loader:
        """The training samples in the run's order; `options` are what techniques set."""
        return Loader(
            TokenDataset(self.folder, "train", recipe.batch.sequence),
            samples_per_step=recipe.step_tokens // recipe.batch.sequence,
            micro=recipe.batch.micro,
            seed=recipe.run.seed,
            shuffle=recipe.data.shuffle,
            **options,
        )

    def validation(self, recipe: Recipe) -> Iterator[Batch]:
        """The held-out batches, always the same ones."""
        dataset = TokenDataset(self.folder, "validation", recipe.batch.sequence)
        return validation_batches(dataset, recipe.batch.micro, samples=recipe.run.validate_sequences)


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


def open_corpus(recipe: Recipe, tokenizer_folder: Path | None, note: Callable[[str], None]) -> Corpus:
    """Prepare the recipe's corpus (with a progress bar) or find it prepared; keep its tokenizer with the run."""
    folder = prepare_with_bar(preparation_of(recipe))
    manifest = read_manifest(folder)
    tokenizer = Tokenizer.load(folder / "tokenizer")
    if tokenizer_folder is not None:
        tokenizer.save(tokenizer_folder)
    note(
        f"Corpus: {manifest.documents('train'):,} documents, {manifest.tokens('train'):,} tokens to train on; "
        f"{manifest.tokens('validation'):,} tokens held out ({folder})."
    )
    return Corpus(folder, tokenizer, manifest.content_sha256)


def prepare_with_bar(preparation: Preparation, **options: Any) -> Path:
    """`prepare`, shown as a progress bar where there is a terminal."""
    with progress_bar() as show:
        return prepare(preparation, cache_folder() / "corpora", progress=show, **options)


def prepare_on(executor: str, preparation: Preparation, **options: Any) -> Path:
    """The same preparation as a datatrove pipeline: `local`, `slurm` or `ray`."""
    from rush.data.pipeline import prepare_pipeline

    return prepare_pipeline(preparation, cache_folder() / "corpora", executor=executor, **options)
