"""Load models from run folders (recipe and checkpoints) and Hugging Face folders.

Nothing in a folder is executed: weights are safetensors, settings are TOML or JSON.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from rush.checkpoint import restore
from rush.checkpoint.frozen_base import adapted_model
from rush.checkpoint.reader import SavedTensors
from rush.errors import DataError, RecipeError
from rush.hub.peft import (
    StoredAdapter,
    attach_adapter,
    is_peft_folder,
    read_peft,
    read_run_adapter,
)
from rush.hub.remote import local_folder
from rush.hub.streamed import hf_weights, run_weights, streamed_model
from rush.hub.weights import PICKLE_SUFFIXES, load_hf_folder, pickle_refusal
from rush.models import Decoder, Shape, build_model
from rush.models.adapters import adapters, merged_state
from rush.models.counts import list_parameters
from rush.models.quantized import form_of
from rush.recipe import Recipe
from rush.recipe_io import load_recipe
from rush.records.checkpoint_store import Checkpoint, verify
from rush.records.run_folder import RunFolder

Note = Callable[[str], None]


def _quiet(text: str) -> None: ...


def read_weights(
    path: str | Path, which: str = "last", note: Note = _quiet, dtype: torch.dtype | None = None
) -> tuple[Shape, dict[str, torch.Tensor]]:
    """Shape and weights from a run folder or a Hugging Face folder; a run's adapters are merged into their base.

    `which` is a run's checkpoint: `last`, `best` (lowest validation loss) or a step. `dtype` is that of merged weights; by
    default the base's.
    """
    folder = existing_folder(path, note)
    run = RunFolder(folder)
    if run.recipe.is_file():
        found = find_checkpoint(run, which, note)
        if restore.base_record(found) is not None:
            model = adapted_run(run, found)
            note(merge_note(model))
            return model.shape, merged_state(model, dtype)
        return load_recipe(str(run.recipe)).shape(), restore.load_weights(found.path)
    if (folder / "config.json").is_file():
        _refuse_checkpoint(folder, which)
        return load_hf_folder(folder)
    if is_peft_folder(folder):
        raise DataError(
            f"{folder} holds an adapter, not a model; give its base's folder, and this one as the adapter (rush chat BASE "
            "--adapter, rush merge --base)."
        )
    raise DataError(
        f"{folder} is neither a run folder (no recipe.toml) nor a Hugging Face folder (no config.json); "
        f"found {', '.join(sorted(entry.name for entry in folder.iterdir())[:5]) or 'nothing'}."
    )


def existing_folder(path: str | Path, note: Note = _quiet) -> Path:
    """The folder, or that of an id on the hub, downloaded."""
    folder = local_folder(path, note)
    # os.path says no where a path cannot exist (a name of 300 characters); Path would raise.
    if os.path.isfile(folder) and folder.suffix in PICKLE_SUFFIXES:
        raise pickle_refusal(folder.parent, folder.name)
    if not os.path.isdir(folder):
        raise DataError(
            f"there is no folder {folder}; give a run folder, a Hugging Face folder or an id (OWNER/NAME) on the hub."
        )
    return folder


def merge_note(model: Decoder) -> str:
    """A note about merged weights."""
    form, count = form_of(model), sum(1 for _ in adapters(model))
    if form is None:
        return f"Merged the adapters of {count} layers into their base."
    return (
        f"Merged the adapters of {count} layers into the dequantized base: its {form.kind} weights, "
        "dequantized, which the adapters were trained with; they are not the original weights."
    )


def adapted_run(run: RunFolder, found: Checkpoint, device: str = "cpu") -> Decoder:
    """The base of a run with the adapters of a checkpoint."""
    recipe, record = load_recipe(str(run.recipe)), restore.base_record(found)
    assert record is not None
    with SavedTensors(found, "model") as saved:  # before an untrusted rank is allocated
        for name, spec in record["adapters"].items():
            down = f"{name}.adapter.a"
            if down not in saved.names or saved.header(down)[0][:1] != (spec["rank"],):
                raise DataError(
                    f"{found.path}: state.json gives {name} an adapter of rank {spec['rank']}, which the weights do not have."
                )
    model = adapted_model(recipe.shape(), record, starting_weights(recipe), recipe.run.seed, device)
    restore.load(found, model)
    return model


def read_adapter(path: str | Path, shape: Shape, which: str = "last", note: Note = _quiet) -> StoredAdapter:
    """Adapters from a PEFT folder or from a run that trained them; `which` is the run's checkpoint."""
    folder = local_folder(path, note)
    if not os.path.exists(folder):
        raise DataError(
            f"there is no folder {folder}; give PEFT's adapter folder, or a run trained with adapters."
        )
    run = RunFolder(folder)
    if not run.recipe.is_file():
        _refuse_checkpoint(folder, which)
        return read_peft(folder, shape)
    recipe = load_recipe(str(run.recipe))
    return read_run_adapter(find_checkpoint(run, which, note), recipe.model.init_from)


def _refuse_checkpoint(folder: Path, which: str) -> None:
    """Refuse a checkpoint of a folder that is not a run and has one set of weights."""
    if which != "last":
        raise RecipeError(
            f"checkpoint {which!r} was asked for, but {folder} is no run folder and has no checkpoints; leave --checkpoint "
            "out, or give the run."
        )


def _split_checkpoint(adapter: str | Path | None, which: str) -> tuple[str, str]:
    """The checkpoints of the base and of the adapter. `which` is the adapter's where that is a run: it was trained on the last
    one of its base."""
    is_run = adapter is not None and os.path.isfile(RunFolder(Path(adapter)).recipe)
    return ("last", which) if is_run else (which, "last")


def find_checkpoint(run: RunFolder, which: str, note: Note) -> Checkpoint:
    store = run.checkpoints
    if not store.steps():
        raise DataError(
            f"{run.path} has no checkpoint yet; train on with --resume, or wait for its first save."
        )

    def damaged(path: Path, reason: str) -> None:
        note(f"DAMAGED checkpoint, not used: {reason}")

    if which in ("last", "best"):
        found = store.newest_good(damaged) if which == "last" else store.best_good(damaged)
        if found is None and which == "last":
            raise DataError(f"no usable checkpoint in {store.folder}: every one is damaged.")
        if found is None:
            raise DataError(
                f"no checkpoint in {store.folder} has a validation loss and is whole; use the last one."
            )
        return found
    if not which.isdecimal() or int(which) not in store.steps():
        steps = ", ".join(str(step) for step in store.steps())
        raise RecipeError(
            f"there is no checkpoint {which!r} in {run.path}; allowed: last, best, or a step: {steps}."
        )
    return verify(store.path(int(which)))


def load_model(
    path: str | Path,
    *,
    checkpoint: str = "last",
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    adapter: str | Path | None = None,
    offload: str = "none",
    note: Note = _quiet,
) -> Decoder:
    """The model in a run folder or a Hugging Face folder; calling it with token ids gives fp32 logits.

    `checkpoint` is the run's; where `adapter` is a run too, the adapter's. With `offload` the blocks stay in host memory
    (`cpu`) or in their files (`disk`) and are loaded one at a time. Adapters are not merged: `rush.models.adapters` can
    disable them.
    """
    path = existing_folder(path, note)
    adapter = None if adapter is None else local_folder(adapter, note)
    if offload != "none":
        return _load_streamed(path, checkpoint, device, dtype, adapter, offload, note)
    of_base, of_adapter = _split_checkpoint(adapter, checkpoint)
    run = RunFolder(path)
    found = find_checkpoint(run, of_base, note) if run.recipe.is_file() else None
    if found is not None and restore.base_record(found) is not None:
        model = adapted_run(run, found, device)
    else:
        shape, weights = read_weights(path, of_base, note)
        with torch.device("meta"):
            model = build_model(shape)
        model.load_state_dict(weights, assign=True)
        model.init_buffers()
    if adapter is not None:
        attach_adapter(model, read_adapter(adapter, model.shape, of_adapter, note), note=note)
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def _load_streamed(
    path: Path,
    which: str,
    device: str,
    dtype: torch.dtype | None,
    adapter: Path | None,
    offload: str,
    note: Note,
) -> Decoder:
    """A model with offloaded blocks, and the adapters of a run or a PEFT folder."""
    of_base, of_adapter = _split_checkpoint(adapter, which)
    run = RunFolder(path)
    found = find_checkpoint(run, of_base, note) if run.recipe.is_file() else None
    record = None if found is None else restore.base_record(found)
    base = path
    if record is not None:
        named = load_recipe(str(run.recipe)).model.init_from
        if named is None or record["form"] is not None or adapter is not None:
            raise RecipeError(
                f"{path} holds adapters over a base that is {'quantized' if record['form'] else 'drawn from a seed'}"
                f"{', and another adapter was given' if adapter is not None else ''}; write the merged model first (rush "
                "merge) and use that with --offload."
            )
        base, adapter = existing_folder(named, note), path
        of_base, of_adapter = "last", which
    if offload == "cpu":
        shape, weights = read_weights(base, of_base, note)
        source: Mapping[str, torch.Tensor] = {
            spec.name: weights[spec.name] for spec in list_parameters(shape)
        }
    elif RunFolder(base).recipe.is_file():
        run = RunFolder(base)
        found = find_checkpoint(run, of_base, note)
        if restore.base_record(found) is not None:
            raise RecipeError(f"{base} holds adapters itself; write the merged model first (rush merge).")
        shape = load_recipe(str(run.recipe)).shape()
        source = run_weights(found)
    else:
        _refuse_checkpoint(base, of_base)
        shape, source = hf_weights(base)
    model = streamed_model(shape, source, device, dtype)
    if adapter is not None:
        attach_adapter(model, read_adapter(adapter, shape, of_adapter, note), source, note)
    return model


def starting_weights(recipe: Recipe) -> dict[str, torch.Tensor] | None:
    """The weights `model.init_from` names, checked against the recipe's shape; None for random ones."""
    if recipe.model.init_from is None:
        return None
    shape, weights = read_weights(recipe.model.init_from)
    wanted = recipe.shape()
    if shape != wanted:
        unlike = [
            f"{f.name} is {getattr(shape, f.name)}, wanted {getattr(wanted, f.name)}"
            for f in dataclasses.fields(Shape)
            if getattr(shape, f.name) != getattr(wanted, f.name)
        ]
        raise RecipeError(
            f"model.init_from ({recipe.model.init_from}) does not fit model.name = {recipe.model.name!r}: "
            f"{'; '.join(unlike)}. Name the model that the weights belong to, or adjust model.shape."
        )
    return weights
