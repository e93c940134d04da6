"""The model to start from: a Hugging Face folder, a run, a model of the hub, or a size by name (random weights).

A recipe names a published size and the fields in which the model differs from it, so that any folder of a
supported family can be trained. This reads only settings and the tokenizer, no weights.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rush.data.hub_client import parse_id
from rush.data.tokenizer import Tokenizer
from rush.errors import DataError, RecipeError, nearest
from rush.hub.config import shape_from_config
from rush.hub.json_files import read_json
from rush.hub.remote import local_settings
from rush.hub.tokenizers import has_tokenizer, load_tokenizer
from rush.hub.weights import INDEX
from rush.models import SIZES, Shape, count_parameters
from rush.models.rope_scaling import rope_type
from rush.recipe_io import load_recipe
from rush.records.run_folder import RunFolder

Note = Callable[[str], None]


def _quiet(text: str) -> None: ...


@dataclass(frozen=True)
class StartModel:
    name: str
    """A published size, as in `model.name`."""
    shape: Shape
    overrides: dict[str, Any] = field(default_factory=dict)
    """`model.shape`: the fields in which it differs from that size."""
    init_from: str | None = None
    tokenizer: Tokenizer | None = None
    """None: one will be trained on the data."""
    tokenizer_path: str = "train"
    """For `data.tokenizer` of a corpus."""
    weights: bool = True
    """Whether the weights are there, all shards of them."""

    @property
    def parameters(self) -> int:
        return count_parameters(self.shape)

    @property
    def pretrained(self) -> bool:
        return self.init_from is not None


def find_model(given: str, note: Note = _quiet) -> StartModel:
    """The model of a folder, of an id on the hub (its settings and tokenizer are downloaded, not its weights), or of a name."""
    if given in SIZES and not os.path.isdir(given):
        return StartModel(given, SIZES[given])
    if parse_id(given) is None and not os.path.isdir(given):
        raise RecipeError(
            f"there is no model {given!r}: neither a folder nor a size; {nearest(given, SIZES)} Give a Hugging Face folder, or "
            "OWNER/NAME on the hub, to start from its weights."
        )
    folder = local_settings(given, note)
    run = RunFolder(folder)
    if run.recipe.is_file():
        shape, weights = load_recipe(str(run.recipe)).shape(), bool(run.checkpoints.steps())
    elif (folder / "config.json").is_file():
        shape = shape_from_config(read_json(folder / "config.json"))
        weights = parse_id(given) is not None or _whole(folder)
    else:
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:5]) or "nothing"
        raise DataError(
            f"{given} is neither a Hugging Face folder (no config.json) nor a run folder (no recipe.toml); found {found}."
        )
    if not has_tokenizer(folder):
        raise DataError(
            f"{given} has no tokenizer.json, and its weights only fit their own tokenizer; copy it from where the weights are from."
        )
    name, overrides = named_shape(shape)
    own = str(Path(given) / run.tokenizer.name) if run.tokenizer.is_dir() else given
    return StartModel(name, shape, overrides, given, load_tokenizer(folder), own, weights)


def _whole(folder: Path) -> bool:
    """Whether a folder has its weights: every shard that the index lists, or a file of them without an index."""
    if not (folder / INDEX).is_file():
        return any(folder.glob("*.safetensors"))
    shards = read_json(folder / INDEX).get("weight_map")
    return isinstance(shards, dict) and all((folder / str(name)).is_file() for name in set(shards.values()))


def named_shape(shape: Shape) -> tuple[str, dict[str, Any]]:
    """The published size with the fewest other fields, and these fields as `model.shape` has them."""
    choices = [(len(differing), name, differing) for name, differing in _differences(shape).items()]
    if not choices:
        raise DataError(f"rush has no size of the family {shape.family} that this model could be written as.")
    _, name, differing = min(choices, key=lambda choice: choice[:2])
    return name, {key: _written(key, getattr(shape, key)) for key in differing}


def _differences(shape: Shape) -> dict[str, list[str]]:
    return {
        name: [
            one.name
            for one in dataclasses.fields(Shape)
            if getattr(size, one.name) != getattr(shape, one.name)
        ]
        for name, size in SIZES.items()
        if size.family == shape.family
    }


def _written(key: str, value: Any) -> Any:
    """A field as a recipe writes it: none as a text, patterns as lists, RoPE scaling as a table."""
    if key == "rope_scaling":
        if value is None:
            return {"rope_type": "default"}
        found = {"rope_type": rope_type(value), **dataclasses.asdict(value)}
        return {name: _written(name, one) for name, one in found.items() if one is not None}
    if value is None:
        return "none"
    return list(value) if isinstance(value, tuple) else value
