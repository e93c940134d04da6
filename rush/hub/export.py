"""Export for other libraries: a run as a Hugging Face folder, its adapters as a PEFT folder, base and adapter merged.

Each has its tokenizer, chat template and stop tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from rush.checkpoint import restore
from rush.checkpoint.frozen_base import base_identity
from rush.data import Tokenizer
from rush.errors import DataError, RecipeError
from rush.hub.folders import (
    adapted_run,
    existing_folder,
    find_checkpoint,
    load_model,
    merge_note,
    read_weights,
)
from rush.hub.peft import peft_base, save_adapter
from rush.hub.remote import local_folder
from rush.hub.streamed import run_weights
from rush.hub.tokenizers import (
    adapted_tokenizer,
    generation_settings,
    has_tokenizer,
    load_tokenizer,
)
from rush.hub.weights import load_hf_folder, save_hf_folder
from rush.models import Decoder, Shape
from rush.models.adapters import merged_state
from rush.models.counts import list_parameters
from rush.recipe_io import load_recipe
from rush.records.run_folder import RunFolder

Note = Callable[[str], None]


def _quiet(text: str) -> None: ...


def export_model(
    path: str | Path,
    to: str | Path,
    *,
    checkpoint: str = "last",
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    note: Note = _quiet,
) -> Shape:
    """Write a Hugging Face folder from a run folder (or another Hugging Face folder): weights and tokenizer.

    A run with adapters is written as the merged model.
    """
    target = _new_folder(to)
    run = RunFolder(existing_folder(path))
    found = find_checkpoint(run, checkpoint, note) if run.recipe.is_file() else None
    if found is not None and restore.base_record(found) is None:
        # One tensor at a time from disk to disk: the model need not fit into memory.
        shape = load_recipe(str(run.recipe)).shape()
        _write_model(target, shape, run_weights(found), path, load_tokenizer(path), dtype, max_shard_bytes)
        return shape
    shape, weights = read_weights(path, checkpoint, note, dtype)
    _write_model(target, shape, weights, path, load_tokenizer(path), dtype, max_shard_bytes)
    return shape


def export_adapter(
    path: str | Path,
    to: str | Path,
    *,
    checkpoint: str = "last",
    base: str | Path | None = None,
    note: Note = _quiet,
) -> list[str]:
    """Write a run's adapters as a PEFT folder with their tokenizer; returns the file names.

    `base` is the Hugging Face folder for adapter_config.json; default: `model.init_from` of the run.
    """
    target, run = _new_folder(to), RunFolder(existing_folder(path))
    found = find_checkpoint(run, checkpoint, note) if run.recipe.is_file() else None
    if found is None or restore.base_record(found) is None:
        raise DataError(
            f"{run.path} was not trained with adapters; export the whole model without --adapter."
        )
    model = adapted_run(run, found)
    if base is not None:
        _check_named_base(local_folder(base, note), model)
        named: str | None = str(base)
    else:
        named = load_recipe(str(run.recipe)).model.init_from
        _note_base(named, note)
    written = save_adapter(target, model, named)
    if not has_tokenizer(path):
        return written
    load_tokenizer(path).save(target)
    return sorted(file.name for file in target.iterdir())


def _check_named_base(base: Path, model: Decoder) -> None:
    """Refuse a base that PEFT cannot open or that has other weights."""
    if RunFolder(base).recipe.is_file():
        raise RecipeError(
            f"{base} is a run folder, which PEFT cannot open; write it as a Hugging Face folder (rush export {base} --to "
            "FOLDER) and name that with --base."
        )
    shape, weights = load_hf_folder(base)
    if base_identity({spec.name: weights[spec.name] for spec in list_parameters(shape)}) != base_identity(
        model
    ):
        raise DataError(
            f"{base} holds other weights than those the adapter was trained on; name the folder that holds them."
        )


def _note_base(named: str | None, note: Note) -> None:
    if named is None:
        note(
            "The base has random weights, drawn from this run's seed; PEFT will need it exported to a folder."
        )
    elif RunFolder(Path(named)).recipe.is_file():
        note(
            f"adapter_config.json names {named} as the base, a run folder: rush opens it, PEFT cannot. For PEFT write the base "
            f"with `rush export {named} --to FOLDER`, and export the adapter with --base FOLDER."
        )


def merge_adapter(
    path: str | Path,
    to: str | Path,
    *,
    base: str | Path | None = None,
    checkpoint: str = "last",
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    note: Note = _quiet,
) -> Shape:
    """Write base and adapter as one model, a Hugging Face folder.

    `path` is a run that trained adapters, or a PEFT folder. `base` replaces the base that it names; adapters of a quantized
    base are then merged into this one.
    """
    target, folder = _new_folder(to), local_folder(path, note)
    run = RunFolder(folder)
    if run.recipe.is_file() and base is None:
        found = find_checkpoint(run, checkpoint, note)
        if restore.base_record(found) is None:
            raise DataError(
                f"{folder} was not trained with adapters: there is nothing to merge; use rush export."
            )
        model, tokenizer, origin = adapted_run(run, found), load_tokenizer(folder), folder
    else:
        named = base if base is not None else peft_base(folder)
        named = None if named is None else local_folder(named, note)
        if named is None or not named.is_dir():
            raise RecipeError(
                f"the base of {folder} is {named}, which is no folder here; give the base's folder with --base."
            )
        model = load_model(named, checkpoint=checkpoint, adapter=folder, note=note)
        tokenizer, origin = adapted_tokenizer(named, folder, model.shape.vocab_size, note), Path(named)
        if tokenizer.chat_template is None and not has_tokenizer(folder):
            note(
                f"{folder} has no tokenizer, and that of {named} no chat template, so the merged model has none. If "
                "the adapter learned to chat, export it again from its run, or merge the run."
            )
    note(merge_note(model))
    _write_model(target, model.shape, merged_state(model, dtype), origin, tokenizer, dtype, max_shard_bytes)
    return model.shape


def _new_folder(to: str | Path) -> Path:
    target = Path(to)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RecipeError(f"{target} exists and is not an empty folder; export to a new one.")
    return target


def _write_model(
    target: Path,
    shape: Shape,
    weights: Mapping[str, torch.Tensor],
    origin: str | Path,
    tokenizer: Tokenizer,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> None:
    """`origin` is the folder whose generation_config.json is kept."""
    save_hf_folder(
        target,
        weights,
        shape,
        max_shard_bytes,
        dtype=dtype,
        bos_id=tokenizer.bos_id,
        eos_id=tokenizer.eos_id,
        generation=generation_settings(origin, tokenizer, shape.vocab_size),
    )
    tokenizer.save(target)
