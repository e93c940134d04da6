"""Arguments and options that several commands share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from rush.errors import RecipeError
from rush.ready import LADDERS, RECIPES


def complete_recipe(incomplete: str) -> list[str]:
    return [name for name in RECIPES.names() if name.startswith(incomplete)]


def complete_ladder(incomplete: str) -> list[str]:
    return [name for name in ("here", *LADDERS.names()) if name.startswith(incomplete)]


def complete_key(incomplete: str) -> list[str]:
    """Recipe keys, as in `batch.micro=`."""
    from rush.recipe import Recipe

    found = []
    for name, field in Recipe.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        found += [f"{name}.{key}=" for key in inner] if inner else [f"{name}="]
    return [key for key in found if key.startswith(incomplete)]


_recipe = typer.Argument(
    help="A recipe's name (see `rush recipes`) or a .toml file.", autocompletion=complete_recipe
)
RecipeName = Annotated[str, _recipe]
OptionalRecipe = Annotated[str | None, _recipe]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Overrides, as in batch.micro=4 optimizer.lr=3e-4.",
        autocompletion=complete_key,
    ),
]
DataFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="FILES",
        help="Your own files or patterns instead of the recipe's data: sets data.source=files and data.files. May be repeated.",
    ),
]
ExtraTechniques = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="A Python file that defines a technique for recipes to name. Its code is executed: give only files you trust. May "
        "be repeated.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value on standard output.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
ModelFolder = Annotated[
    Path, typer.Argument(help="A run folder, a Hugging Face folder, or an id on the hub (OWNER/NAME).")
]
Dtype = Annotated[
    Literal["keep", "float32", "bfloat16", "float16"], typer.Option(help="dtype of the weights.")
]
MaxShardGb = Annotated[float, typer.Option(help="Maximum size of a weight file, in gigabytes.", min=0.001)]
ExecutorOptions = Annotated[
    list[str] | None,
    typer.Option(help="Option of the executor, as in partition=cpu or time=04:00:00. May be repeated."),
]


def parse_options(words: list[str] | None) -> dict[str, str]:
    """The values of --option."""
    for word in words or ():
        if "=" not in word:
            raise RecipeError(f"--option is {word!r}; write it as name=value.")
    return dict(word.split("=", 1) for word in words or ())


def is_override(word: str) -> bool:
    """Whether it is KEY=VALUE; a file may have `=` in its path, and a sweep's folder may be named like an override."""
    return "=" in word and not os.path.isfile(word)


def with_data(overrides: list[str] | None, files: list[str] | None) -> list[str]:
    """The overrides, after those of --data."""
    given = list(overrides or [])
    if not files:
        return given
    named = [word for word in given if word.split("=", 1)[0] in ("data", "data.source", "data.files")]
    if named:
        raise RecipeError(
            f"--data sets data.source and data.files; found {named[0]!r} beside it. Leave one of them out."
        )
    return ["data.source=files", f"data.files={json.dumps(files)}", *given]
