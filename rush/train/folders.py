"""Models on disk: a run folder (recipe and checkpoints) or a Hugging Face folder, opened alike.

Nothing in either is executed: weights are safetensors, settings are TOML or JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from rush.data import Tokenizer
from rush.errors import DataError, RecipeError
from rush.models import Decoder, Shape, build_model
from rush.models.huggingface import load_hf_folder, save_hf_folder
from rush.recipe import Recipe
from rush.recipe_io import load_recipe
from rush.records.checkpoints import Checkpoint, verify
from rush.records.run_folder import RunFolder
from rush.train import checkpoint

Note = Callable[[str], None]


def _quiet(text: str) -> None: ...


def read_weights(
    path: str | Path, which: str = "last", note: Note = _quiet
) -> tuple[Shape, dict[str, torch.Tensor]]:
    """Shape and weights from a run folder or a Hugging Face folder.

    `which` picks a run's checkpoint: `last`, `best` (lowest validation loss) or a step's number.
    """
    folder = Path(path)
    if folder.is_file() and folder.suffix in (".pt", ".pth", ".bin", ".pkl", ".ckpt"):
        raise DataError(
            f"{folder} is a pickle, which can run code when it is opened, so it is refused; give a run folder or a "
            "Hugging Face folder with safetensors."
        )
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; give a run folder or a Hugging Face folder.")
    run = RunFolder(folder)
    if run.recipe.is_file():
        found = _pick_checkpoint(run, which, note)
        return load_recipe(str(run.recipe)).shape(), checkpoint.load_weights(found.path)
    if (folder / "config.json").is_file():
        return load_hf_folder(folder)
    raise DataError(
        f"{folder} is neither a run folder (no recipe.toml) nor a Hugging Face folder (no config.json); "
        f"found {', '.join(sorted(entry.name for entry in folder.iterdir())[:5]) or 'nothing'}."
    )


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
    note: Note = _quiet,
) -> Decoder:
    """The model in a run folder or a Hugging Face folder; calling it with token ids gives fp32 logits."""
    shape, weights = read_weights(path, checkpoint, note)
    with torch.device("meta"):
        model = build_model(shape)
    model.load_state_dict(weights, assign=True)
    model.init_buffers()
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a run folder or a Hugging Face folder."""
    folder = Path(path)
    run = RunFolder(folder)
    return Tokenizer.load(run.tokenizer if run.tokenizer.is_dir() else folder)


def export_model(
    path: str | Path,
    to: str | Path,
    *,
    checkpoint: str = "last",
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    note: Note = _quiet,
) -> Shape:
    """Write a Hugging Face folder from a run folder (or another Hugging Face folder): weights and tokenizer."""
    target = Path(to)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RecipeError(f"{target} exists and is not an empty folder; export to a new one.")
    shape, weights = read_weights(path, checkpoint, note)
    tokenizer = load_tokenizer(path)
    save_hf_folder(
        target, weights, shape, max_shard_bytes, dtype=dtype, bos_id=tokenizer.bos_id, eos_id=tokenizer.eos_id
    )
    tokenizer.save(target)
    return shape


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
