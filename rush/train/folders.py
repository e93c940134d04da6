"""Models on disk: a run folder (recipe and checkpoints) or a Hugging Face folder, opened alike.

Nothing in either is executed: weights are safetensors, settings are TOML or JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from rush.data import Tokenizer
from rush.data.conversations import find_template
from rush.errors import DataError, RecipeError
from rush.models import Decoder, Shape, build_model
from rush.models.adapters import adapters, merged_state
from rush.models.counts import list_parameters
from rush.models.huggingface import load_hf_folder, save_hf_folder
from rush.models.quantised import form_of
from rush.recipe import Recipe
from rush.recipe_io import load_recipe
from rush.records.checkpoints import Checkpoint, verify
from rush.records.run_folder import RunFolder
from rush.train import checkpoint as checkpoints
from rush.train.adapters import (
    StoredAdapter,
    holds_adapter,
    peft_base,
    put_on,
    read_peft,
    read_run_adapter,
    save_adapter,
)
from rush.train.frozen import adapted_model
from rush.train.offload import hf_weights, run_weights, streamed_model

Note = Callable[[str], None]


def _quiet(text: str) -> None: ...


def read_weights(
    path: str | Path, which: str = "last", note: Note = _quiet, dtype: torch.dtype | None = None
) -> tuple[Shape, dict[str, torch.Tensor]]:
    """Shape and weights from a run folder or a Hugging Face folder; a run's adapters come merged into their base.

    `which` picks a run's checkpoint: `last`, `best` (lowest validation loss) or a step's number. `dtype` is what merged
    weights are rounded to; without it, the base's.
    """
    folder = _existing(path)
    run = RunFolder(folder)
    if run.recipe.is_file():
        found = _pick_checkpoint(run, which, note)
        if checkpoints.base_record(found) is not None:
            model = _adapted_run(run, found)
            note(say_merged(model))
            return model.shape, merged_state(model, dtype)
        return load_recipe(str(run.recipe)).shape(), checkpoints.load_weights(found.path)
    if (folder / "config.json").is_file():
        return load_hf_folder(folder)
    if holds_adapter(folder):
        raise DataError(
            f"{folder} holds an adapter, not a model; give its base's folder, and this one as the adapter (rush chat BASE "
            "--adapter, rush merge --base)."
        )
    raise DataError(
        f"{folder} is neither a run folder (no recipe.toml) nor a Hugging Face folder (no config.json); "
        f"found {', '.join(sorted(entry.name for entry in folder.iterdir())[:5]) or 'nothing'}."
    )


def _existing(path: str | Path) -> Path:
    folder = Path(path)
    if folder.is_file() and folder.suffix in (".pt", ".pth", ".bin", ".pkl", ".ckpt"):
        raise DataError(
            f"{folder} is a pickle, which can run code when it is opened, so it is refused; give a run folder or a "
            "Hugging Face folder with safetensors."
        )
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; give a run folder or a Hugging Face folder.")
    return folder


def say_merged(model: Decoder) -> str:
    """What a person should know about merged weights."""
    form, count = form_of(model), sum(1 for _ in adapters(model))
    if form is None:
        return f"Merged the adapters of {count} layers into their base."
    return (
        f"Merged the adapters of {count} layers into the dequantised base: the weights that its {form.kind} codes stand "
        "for, which the adapters were trained beside; they are not the weights the codes were made from."
    )


def _adapted_run(run: RunFolder, found: Checkpoint, device: str = "cpu") -> Decoder:
    """A run's base, made again, with the adapters of a checkpoint on it."""
    recipe, record = load_recipe(str(run.recipe)), checkpoints.base_record(found)
    assert record is not None
    model = adapted_model(recipe.shape(), record, starting_weights(recipe), recipe.run.seed, device)
    checkpoints.load(found, model)
    return model


def read_adapter(path: str | Path, shape: Shape, note: Note = _quiet) -> StoredAdapter:
    """Adapters from PEFT's folder or from a run that was trained with them."""
    folder = Path(path)
    if not folder.exists():
        raise DataError(
            f"there is no folder {folder}; give PEFT's adapter folder, or a run trained with adapters."
        )
    run = RunFolder(folder)
    if not run.recipe.is_file():
        return read_peft(folder, shape)
    recipe = load_recipe(str(run.recipe))
    return read_run_adapter(_pick_checkpoint(run, "last", note), recipe.model.init_from)


def _pick_checkpoint(run: RunFolder, which: str, note: Note) -> Checkpoint:
    store = run.checkpoints
    if not store.steps():
        raise DataError(
            f"{run.path} has no checkpoint yet; train on with --resume, or wait for its first save."
        )

    def damaged(path: Path, reason: str) -> None:
        note(f"DAMAGED checkpoint, not used: {reason}")

    if which in ("last", "best"):
        found = store.newest_good(damaged) if which == "last" else store.best_good(damaged)
        if found is None:
            why = "is damaged" if which == "last" else "has a validation loss and is whole"
            raise DataError(f"no usable checkpoint in {store.folder}: every one {why}." if which == "last" else
                            f"no checkpoint in {store.folder} {why}; use the last one.")  # fmt: skip
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

    With `offload` its blocks stay in host memory (`cpu`) or in their files (`disk`) and come in one at a time.

    A run's adapters, and those of the folder `adapter`, stay apart from their base: `rush.models.adapters` switches them
    off and on.
    """
    if offload != "none":
        return _load_streamed(path, checkpoint, device, dtype, adapter, offload, note)
    run = RunFolder(_existing(path))
    found = _pick_checkpoint(run, checkpoint, note) if run.recipe.is_file() else None
    if found is not None and checkpoints.base_record(found) is not None:
        model = _adapted_run(run, found, device)
    else:
        shape, weights = read_weights(path, checkpoint, note)
        with torch.device("meta"):
            model = build_model(shape)
        model.load_state_dict(weights, assign=True)
        model.init_buffers()
    if adapter is not None:
        put_on(model, read_adapter(adapter, model.shape, note), note=note)
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def _load_streamed(
    path: str | Path,
    which: str,
    device: str,
    dtype: torch.dtype | None,
    adapter: str | Path | None,
    offload: str,
    note: Note,
) -> Decoder:
    """A model whose blocks are brought in one at a time, with the adapters of a run or a folder on it."""
    run = RunFolder(_existing(path))
    found = _pick_checkpoint(run, which, note) if run.recipe.is_file() else None
    record = None if found is None else checkpoints.base_record(found)
    base: str | Path = path
    if record is not None:
        named = load_recipe(str(run.recipe)).model.init_from
        if named is None or record["form"] is not None or adapter is not None:
            raise RecipeError(
                f"{path} holds adapters over a base that is {'quantised' if record['form'] else 'drawn from a seed'}"
                f"{', and another adapter was given' if adapter is not None else ''}; write the merged model first (rush "
                "merge) and use that with --offload."
            )
        base, adapter = named, path
    if offload == "cpu":
        shape, weights = read_weights(base, "last" if record is not None else which, note)
        held: Mapping[str, torch.Tensor] = {spec.name: weights[spec.name] for spec in list_parameters(shape)}
    elif RunFolder(Path(base)).recipe.is_file():
        run = RunFolder(_existing(base))
        found = _pick_checkpoint(run, "last" if record is not None else which, note)
        if checkpoints.base_record(found) is not None:
            raise RecipeError(f"{base} holds adapters itself; write the merged model first (rush merge).")
        shape = load_recipe(str(run.recipe)).shape()
        held = run_weights(found)
    else:
        shape, held = hf_weights(_existing(base))
    model = streamed_model(shape, held, device, dtype)
    if adapter is not None:
        put_on(model, read_adapter(adapter, shape, note), held, note)
    return model


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a run folder or a Hugging Face folder; one that learned to chat, with the template it learned."""
    folder = Path(path)
    run = RunFolder(folder)
    tokenizer = Tokenizer.load(run.tokenizer if run.tokenizer.is_dir() else folder)
    recipe = load_recipe(str(run.recipe)) if run.recipe.is_file() else None
    if recipe is None or recipe.objective.kind == "lm":
        return tokenizer
    return dataclasses.replace(tokenizer, chat_template=find_template(recipe.data.template, tokenizer).source)


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

    Of a run that trained adapters this is the merged model.
    """
    target = _new_folder(to)
    run = RunFolder(_existing(path))
    found = _pick_checkpoint(run, checkpoint, note) if run.recipe.is_file() else None
    if found is not None and checkpoints.base_record(found) is None:
        # Tensor by tensor from the disk to the disk: a model is exported where it would not fit.
        shape = load_recipe(str(run.recipe)).shape()
        _write_model(target, shape, run_weights(found), load_tokenizer(path), dtype, max_shard_bytes)
        return shape
    shape, weights = read_weights(path, checkpoint, note, dtype)
    _write_model(target, shape, weights, load_tokenizer(path), dtype, max_shard_bytes)
    return shape


def export_adapter(
    path: str | Path, to: str | Path, *, checkpoint: str = "last", note: Note = _quiet
) -> list[str]:
    """Write a run's adapters as PEFT's folder; returns the names of the files."""
    target, run = _new_folder(to), RunFolder(_existing(path))
    found = _pick_checkpoint(run, checkpoint, note) if run.recipe.is_file() else None
    if found is None or checkpoints.base_record(found) is None:
        raise DataError(
            f"{run.path} was not trained with adapters; export the whole model without --adapter."
        )
    base = load_recipe(str(run.recipe)).model.init_from
    if base is None:
        note(
            "The base has random weights, drawn from this run's seed; PEFT will need it exported to a folder."
        )
    return save_adapter(target, _adapted_run(run, found), base)


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

    `path` is a run that trained adapters, or PEFT's folder. The base is what the run or PEFT's settings name, unless
    it is given; then adapters that were trained beside a quantised base are merged into this one as it is.
    """
    target, folder = _new_folder(to), Path(path)
    run = RunFolder(folder)
    if run.recipe.is_file() and base is None:
        found = _pick_checkpoint(run, checkpoint, note)
        if checkpoints.base_record(found) is None:
            raise DataError(
                f"{folder} was not trained with adapters: there is nothing to merge; use rush export."
            )
        model, tokenizer = _adapted_run(run, found), load_tokenizer(folder)
    else:
        named = base if base is not None else peft_base(folder)
        if named is None or not Path(named).is_dir():
            raise RecipeError(
                f"{folder} does not say where its base is (base_model_name_or_path is {named!r}); name the base's folder "
                "with --base."
            )
        model = load_model(named, adapter=folder, note=note)
        tokenizer = load_tokenizer(run.path if run.tokenizer.is_dir() else named)
    note(say_merged(model))
    _write_model(target, model.shape, merged_state(model, dtype), tokenizer, dtype, max_shard_bytes)
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
    tokenizer: Tokenizer,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
) -> None:
    save_hf_folder(
        target, weights, shape, max_shard_bytes, dtype=dtype, bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id
    )
    tokenizer.save(target)


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
