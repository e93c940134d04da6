"""Evaluation data: the held-out split of the run or of another recipe, or all of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rush.data import Batch, TokenDataset, Tokenizer, progress_bar, validation_batches
from rush.data.conversations import (
    DocumentPreparation,
    DocumentSet,
    prepare_documents,
    read_document_manifest,
)
from rush.data.conversations.rows import plan_rows, read_unit_rows
from rush.data.document_loader import document_validation
from rush.data.documents import Documents
from rush.data.packing import Pad
from rush.errors import DataError
from rush.files import cache_folder
from rush.hub.tokenizers import load_tokenizer
from rush.models import Shape
from rush.recipe import Recipe
from rush.recipe_io import load_recipe
from rush.records.run_folder import RunFolder
from rush.training.corpus import open_corpus

Note = Callable[[str], None]
SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True)
class HeldOutData:
    batches: Callable[[], Iterator[Batch]]
    """The same batches at every call."""
    paired: bool
    documents: Documents | None
    about: str


def open_held_out(
    folder: Path, data: str | None, shape: Shape, rows: int, limit: int | None, note: Note
) -> HeldOutData:
    """The data that `data` names: a file, a run or a recipe; by default the run's own. `rows` is the batch size."""
    if data is not None and (data.endswith(SUFFIXES) or Path(data).is_file()) and not data.endswith(".toml"):
        return _from_file(folder, Path(data), shape, rows, limit, note)
    recipe = _recipe(folder, data)
    corpus = open_corpus(recipe, None, note)
    _check_tokenizer(folder, corpus.tokenizer, data)
    about = f"the held-out split of {data or folder}"
    if recipe.objective.kind == "lm":
        windows = TokenDataset(corpus.folder, "validation", min(recipe.batch.sequence, shape.context))
        count = len(windows) if limit is None else limit
        return HeldOutData(lambda: validation_batches(windows, rows, samples=count), False, None, about)
    documents = DocumentSet(corpus.folder, "validation")
    return _from_documents(
        documents, rows, recipe.batch.sequence, limit, recipe.objective.kind == "dpo", about
    )


def _recipe(folder: Path, data: str | None) -> Recipe:
    named = folder if data is None else Path(data)
    if RunFolder(named).recipe.is_file():
        return load_recipe(str(RunFolder(named).recipe))
    if data is None:
        raise DataError(
            f"{folder} is no run folder, so it has no data; name some with --data: a recipe, a run folder, or a file of "
            "conversations or pairs."
        )
    return load_recipe(data)


def _check_tokenizer(folder: Path, theirs: Tokenizer, data: str | None) -> None:
    if (why := load_tokenizer(folder).difference(theirs)) is not None:
        raise DataError(
            f"the tokenizer of {folder} is not the one that {data or 'its recipe'} prepares its data with ({why}), so the losses "
            "cannot be compared; evaluate on a file, which is encoded with the model's own tokenizer."
        )


def _from_file(
    folder: Path, path: Path, shape: Shape, rows: int, limit: int | None, note: Note
) -> HeldOutData:
    if not path.is_file():
        raise DataError(
            f"there is no file {path}; --data takes a recipe, a run folder, or a .jsonl, .csv or .parquet file."
        )
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty, so there is nothing to evaluate on.")
    units = plan_rows("files", [str(path)], None)
    first = next((row for unit, _ in units for row in read_unit_rows("files", unit)), None)
    if first is None:
        raise DataError(f"{path} holds no row, so there is nothing to evaluate on.")
    paired = all(first.values.get(name) is not None for name in ("chosen", "rejected"))
    run = RunFolder(folder)
    preparation = DocumentPreparation(
        source="files",
        files=(str(path),),
        template="auto",
        too_long="drop",
        sequence=shape.context,
        tokenizer=str(run.tokenizer if run.tokenizer.is_dir() else folder),
        vocab_size=shape.vocab_size,
        validation=0.0,
        paired=paired,
    )
    with progress_bar() as show:
        prepared = prepare_documents(preparation, cache_folder() / "documents", show)
    if dropped := read_document_manifest(prepared).losses():
        note(dropped)
    documents = DocumentSet(prepared, "train")
    return _from_documents(documents, rows, shape.context, limit, paired, str(path))


def _from_documents(
    documents: Documents, rows: int, sequence: int, limit: int | None, paired: bool, about: str
) -> HeldOutData:
    if len(documents) == 0:
        raise DataError(
            f"{about} has no document left to evaluate on; raise data.validation, or give more rows."
        )
    micro = max(1, rows // 2) if paired else rows
    return HeldOutData(
        lambda: document_validation(documents, Pad(0), micro, sequence, limit, paired=paired),
        paired,
        documents,
        about,
    )
