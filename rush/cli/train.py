"""`rush train`: run a recipe."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rush.cli.complete import complete_recipe
from rush.cli.output import Json, print_json
from rush.errors import Diverged, RecipeError, RushError

if TYPE_CHECKING:
    from rush.recipe import Recipe

LATER_S = 5.0
"""What a rank waits with its leaving, when rank 0 has something to say."""


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
    nproc: Annotated[
        int | None,
        typer.Option(help="Start this many ranks on this machine: the product of the layout's sizes."),
    ] = None,
    json: Json = False,
) -> None:
    """Train a model as a recipe says.

    Everything is written to the run's folder: recipe, metrics, samples, checkpoints. Ctrl-C stops after
    the current step with a checkpoint; --resume goes on from there, also after a crash or a power cut.

    Examples:

      rush train tiny

      rush train gpt2-124m batch.micro=32 optimizer.lr=3e-4 --out runs/gpt2

      rush train --out runs/gpt2 --resume

      rush train llama-3.2-1b layout.fsdp=8 --nproc 8

    Under torchrun (or another launcher that sets RANK and WORLD_SIZE) leave --nproc out: every process joins the others.
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

    from rush.parallel import started_rank, started_world
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
    if nproc is not None:
        _start_ranks(
            nproc, chosen or load_recipe(str(folder / "recipe.toml")), recipe, changes, folder, resume, json
        )
    with _one_message():
        summary = train_recipe(chosen, folder, resume=resume, view=Silent() if json else terminal_view())
    if started_rank() != 0:
        raise typer.Exit(130 if summary.interrupted else 0)
    folder = Path(summary.folder)
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
        many = f" --nproc {started_world()}" if started_world() > 1 else ""
        typer.echo(f"Go on with: rush train --out {folder} --resume{many}")
        raise typer.Exit(130)
    tuned = load_recipe(str(folder / "recipe.toml")).objective.kind != "lm"
    words = f"rush chat {folder}" if tuned else f"rush generate {folder} --prompt 'def '"
    typer.echo(f"Talk to it with: {words}")


def _start_ranks(
    nproc: int, chosen: Recipe, recipe: str | None, changes: list[str], folder: Path, resume: bool, json: bool
) -> None:
    """This command on several ranks; does not return. A wrong number of them is refused before any is started."""
    from rush.parallel import check_world, started_world
    from rush.parallel.launching import launch

    if started_world() > 1:
        raise RecipeError(
            f"--nproc is {nproc}, but this is already one of {started_world()} ranks; leave --nproc out here."
        )
    check_world(chosen.layout.model_dump(), nproc)
    words = ["train", *([recipe] if recipe else []), *changes, "--out", str(folder)]
    words += ["--resume"] * resume + ["--json"] * json + ["--debug"] * ("--debug" in sys.argv)
    raise typer.Exit(launch(nproc, words))


@contextmanager
def _one_message() -> Iterator[None]:
    """What is wrong on all ranks is said by rank 0; what happened to another one, by that one."""
    from rush.parallel import started_rank
    from rush.parallel.ranks import SAID

    try:
        yield
    except RushError as error:
        if (rank := started_rank()) == 0:
            raise
        alike = isinstance(error, RecipeError | Diverged) or SAID in getattr(error, "__notes__", ())
        if not alike:
            typer.secho(f"error on rank {rank}: {error}", err=True, fg="red")
        else:
            # Launchers end all ranks as soon as one has left: rank 0 should have spoken by then.
            time.sleep(LATER_S)
        raise typer.Exit(error.exit_code) from None
