"""`rush train`: run a recipe."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rush.cli.complete import complete_recipe
from rush.cli.output import Json, print_json
from rush.errors import RecipeError


def train(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="A recipe's name (see `rush recipes`) or a .toml file.", autocompletion=complete_recipe
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes, as in batch.micro=32 optimizer.lr=3e-4."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run's folder; runs/RECIPE-DATE without it.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out, to the same bits.")
    ] = False,
    json: Json = False,
) -> None:
    """Train a model as a recipe says.

    Everything is written to the run's folder: recipe, metrics, samples, checkpoints. Ctrl-C stops after
    the current step with a checkpoint; --resume goes on from there, also after a crash or a power cut.

    Examples:

      rush train tiny

      rush train gpt2-124m batch.micro=32 optimizer.lr=3e-4 --out runs/gpt2

      rush train --out runs/gpt2 --resume
    """
    changes = list(overrides or [])
    if recipe is not None and "=" in recipe:
        changes.insert(0, recipe)
        recipe = None
    if recipe is None and not (resume and out):
        raise RecipeError("no recipe was named; write `rush train RECIPE` (see `rush recipes`), or give --out with "
                          "--resume to go on with a run.")  # fmt: skip
    if resume and out is None:
        raise RecipeError("--resume needs --out: the folder of the run to go on with.")

    from rush.recipe_io import load_recipe
    from rush.train.loop import train_recipe
    from rush.train.view import Silent, terminal_view

    chosen = None
    if recipe is not None:
        chosen = load_recipe(recipe, changes)
    elif changes:
        assert out is not None
        chosen = load_recipe(str(out / "recipe.toml"), changes)
    folder = out or Path("runs") / f"{Path(recipe or 'run').stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    summary = train_recipe(chosen, folder, resume=resume, view=Silent() if json else terminal_view())
    if json:
        print_json(asdict(summary))
        return
    validation = "" if summary.val_loss is None else f", validation loss {summary.val_loss:.4f}"
    verb = "Stopped" if summary.interrupted else "Done"
    typer.echo(
        f"{verb} at step {summary.step} of {summary.steps}: loss {summary.loss:.4f}{validation}, "
        f"{summary.tokens:,} tokens, {summary.tokens_per_s:,.0f} tokens/s."
    )
    if summary.interrupted:
        typer.echo(f"Go on with: rush train --out {folder} --resume")
        raise typer.Exit(130)
    tuned = load_recipe(str(folder / "recipe.toml")).objective.kind != "lm"
    words = f"rush chat {folder}" if tuned else f"rush generate {folder} --prompt 'def '"
    typer.echo(f"Talk to it with: {words}")
