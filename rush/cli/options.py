"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rush.errors import RecipeError
from rush.ready import RECIPES


def complete_recipe(incomplete: str) -> list[str]:
    return [name for name in RECIPES.names() if name.startswith(incomplete)]


_recipe = typer.Argument(
    help="A recipe's name (see `rush recipes`) or a .toml file.", autocompletion=complete_recipe
)
RecipeName = Annotated[str, _recipe]
OptionalRecipe = Annotated[str | None, _recipe]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Overrides, as in batch.micro=4 optimizer.lr=3e-4."),
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
ModelFolder = Annotated[Path, typer.Argument(help="A run folder or a Hugging Face folder.")]
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
