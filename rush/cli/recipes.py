"""`rush recipes`: the ready recipes, one of them in full, and the schema for editors."""

from __future__ import annotations

import shlex
from typing import Any

import typer

from rush.cli.options import Json, Overrides, RecipeName
from rush.cli.output import next_step, print_json, print_table

app = typer.Typer(
    help="List the ready recipes, print one in full, or print the JSON Schema.", no_args_is_help=False
)


@app.callback(invoke_without_command=True)
def _list(context: typer.Context, json: Json = False) -> None:
    if context.invoked_subcommand is not None:
        return
    from rush.models import count_parameters, flops_per_token
    from rush.ready import RECIPES
    from rush.recipe_io import load_recipe

    recipes = {name: load_recipe(name) for name in RECIPES.names()}
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "parameters": count_parameters(recipe.shape()),
            "flops_per_token": flops_per_token(recipe.shape(), recipe.batch.sequence),
            "step_tokens": recipe.step_tokens,
            "steps": recipe.schedule.steps,
            "epochs": recipe.schedule.epochs,
            "about": recipe.about,
        }
        for name, recipe in recipes.items()
    ]
    rows.sort(key=lambda row: row["parameters"])
    if json:
        print_json(rows)
        return
    print_table(
        ["recipe", "size", "length", "what it is"],
        [
            [
                row["name"],
                f"{row['parameters'] / 1e9:.3g}B"
                if row["parameters"] >= 1e9
                else f"{row['parameters'] / 1e6:.3g}M",
                f"{row['steps']:,} steps" if row["steps"] else f"{row['epochs']:g} epochs",
                row["about"],
            ]
            for row in rows
        ],
    )
    next_step("rush", "train", "tiny", why="or `rush recipes show NAME` for every key")


@app.command()
def show(
    name: RecipeName,
    overrides: Overrides = None,
    json: Json = False,
) -> None:
    """Print a recipe fully resolved, with every default."""
    from rush.recipe_io import load_recipe, write_toml

    recipe = load_recipe(name, overrides or [], auto=True)
    if json:
        print_json({"digest": recipe.digest, "recipe": recipe.model_dump(mode="json")})
        return
    typer.echo(f"# digest {recipe.digest}\n{write_toml(recipe)}", nl=False)
    typer.echo(f"# Next: {shlex.join(['rush', 'train', name, *(overrides or [])])}")  # TOML, also in a file


@app.command()
def schema() -> None:
    """Print the JSON Schema of a recipe, for editors that complete and check TOML."""
    from rush.recipe import Recipe

    print_json(Recipe.model_json_schema())
