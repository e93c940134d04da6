"""`rush train`: run a recipe."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rush.cli.options import (
    DataFiles,
    ExtraTechniques,
    Json,
    OptionalRecipe,
    Overrides,
    is_override,
    with_data,
)
from rush.cli.output import next_step, note, print_json
from rush.cli.ranks import one_message, refuse_nested, technique_words
from rush.cli.shutdown import has_exception_hooks, set_reporter
from rush.errors import RecipeError
from rush.ready import short_name

if TYPE_CHECKING:
    from rush.recipe import Recipe
    from rush.records.run_folder import RunFolder
    from rush.training.session import Summary

RESTARTS = 3
"""Consecutive restarts without a new checkpoint: enough for a transient failure, too few to burn a night on a bug."""


def train(
    recipe: OptionalRecipe = None,
    overrides: Overrides = None,
    data: DataFiles = None,
    out: Annotated[Path | None, typer.Option(help="Run folder. Default: runs/RECIPE-DATE.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in --out, bit for bit.")] = False,
    until: Annotated[
        int | None,
        typer.Option(
            help="Stop after this step, with a checkpoint to resume from. The learning rate schedule does not change.",
            min=1,
        ),
    ] = None,
    nproc: Annotated[
        str | None,
        typer.Option(
            metavar="N or MIN:N",
            help="Ranks to start on this machine: the product of the layout's sizes. With MIN:N the run continues on fewer ranks, "
            "down to MIN, when restarts fail.",
        ),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(help="With --nproc: consecutive restarts of failed ranks without a new checkpoint."),
    ] = RESTARTS,
    shrink: Annotated[
        bool,
        typer.Option(
            "--shrink",
            help="Under torchrun: continue on fewer ranks than the layout needs, after a node is lost.",
        ),
    ] = False,
    technique: ExtraTechniques = None,
    json: Json = False,
) -> None:
    """Train a model from a recipe.

    Recipe, metrics, samples, checkpoints and a page (report.html) are written to the run folder. `rush watch` shows it live. Ctrl-C stops after the current step and saves a
    checkpoint. --resume continues from the last checkpoint, also after a crash or a power cut.

    Examples:

      rush train tiny

      rush train gpt2-124m batch.micro=32 optimizer.lr=3e-4 --out runs/gpt2

      rush train --out runs/gpt2 --resume

      rush train llama-3.2-1b layout.fsdp=8 --nproc 8

    When a rank is killed, crashes or hangs, all ranks stop and restart from the last checkpoint, bit for bit.

    Under torchrun, srun or another launcher that sets RANK and WORLD_SIZE, omit --nproc. `rush launch` writes the batch
    script for a cluster.
    """
    changes = with_data(overrides, data)
    if recipe is not None and is_override(recipe):
        changes.insert(0, recipe)
        recipe = None
    if "SLURM_PROCID" in os.environ:
        from rush.parallel.slurm_ranks import set_rank_variables

        set_rank_variables()
    files = technique or []
    with one_message():
        if recipe is None and not (resume and out):
            raise RecipeError("no recipe was given; write `rush train RECIPE` (see `rush recipes`), or give --out with "
                              "--resume to resume a run.")  # fmt: skip
        if resume and out is None:
            raise RecipeError("--resume needs --out: the folder of the run to resume.")
        from rush.techniques.api.own_files import added

        with added(files):
            if nproc is not None:
                start_ranks(nproc, restarts, recipe, changes, out, resume, json, files, until)
            summary = _train_here(recipe, changes, out, resume, shrink, json, until)

    from rush.parallel import started_rank, started_world
    from rush.recipe_io import load_recipe

    as_asked = until is not None and summary.step >= until
    if started_rank() != 0:
        raise typer.Exit(130 if summary.interrupted and not as_asked else 0)
    folder = Path(summary.folder)
    if json:
        print_json(asdict(summary))
        return
    validation = "" if summary.val_loss is None else f", validation loss {summary.val_loss:.4f}"
    verb = "Stopped" if summary.interrupted else "Done"
    over = f" (mean of the last {summary.loss_steps} steps)" if summary.loss_steps > 1 else ""
    typer.echo(
        f"{verb} at step {summary.step} of {summary.steps}: loss {summary.loss:.4f}{over}{validation}, "
        f"{summary.tokens:,} tokens, {summary.epochs:.3g} passes over the data, {summary.tokens_per_s:,.0f} tokens/s."
    )
    if summary.interrupted:
        many = ["--nproc", str(started_world())] if started_world() > 1 else []
        next_step("rush", "train", "--out", str(folder), "--resume", *many)
        raise typer.Exit(0 if as_asked else 130)
    tuned = load_recipe(str(folder / "recipe.toml")).objective.kind != "lm"
    if (folder / "report.html").is_file():
        typer.echo(f"Report: {folder / 'report.html'}")
    try_it = ["chat", str(folder)] if tuned else ["generate", str(folder), "--prompt", "def "]
    next_step("rush", *try_it)


def _train_here(
    recipe: str | None,
    changes: list[str],
    out: Path | None,
    resume: bool,
    shrink: bool,
    json: bool,
    until: int | None,
) -> Summary:
    """Train in this process, alone or as one rank of a launcher."""
    if "RANK" in os.environ:
        # Hide torch's own socket warnings, which would precede the one useful message.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from rush.api import train as train_run
    from rush.parallel.restarts import restarted
    from rush.recipe_io import load_recipe
    from rush.records.run_folder import RunFolder
    from rush.training.failures import RunStatus, report_crashes, report_late
    from rush.training.view import View, terminal_view

    folder = _folder(recipe, out)
    chosen = _recipe(recipe, changes, folder)
    if shrink:
        chosen = _shrunk(_decided(chosen, RunFolder(folder)) or load_recipe(str(folder / "recipe.toml")))
    if recipe is not None and chosen is not None and recipe.endswith(".toml"):
        _warn_of_another_machine(Path(recipe).expanduser(), chosen)
    stored = folder / "recipe.toml"
    status = RunStatus(
        RunFolder(folder), chosen or (load_recipe(str(stored)) if os.path.isfile(stored) else None)
    )
    view = View() if json else terminal_view(_how_to_watch(folder, status.recipe))
    set_reporter(partial(report_late, status, status.uses()))
    if has_exception_hooks():
        report_crashes(status)
    return train_run(chosen, out=folder, resume=resume or restarted(), view=view, until=until).summary


def _how_to_watch(folder: Path, recipe: Recipe | None) -> str:
    """The first line that a run prints."""
    from rush.training.trackers import where_to_look

    others = where_to_look(recipe, folder) if recipe is not None else []
    return f"Watch it: rush watch {shlex.quote(str(folder))}" + f" (or: {'; '.join(others)})" * bool(others)


def _warn_of_another_machine(file: Path, recipe: Recipe) -> None:
    """A recipe from `rush tune` records the machine it was tuned on. It trains elsewhere too, but may not be the fastest there."""
    from rush.parallel import started_rank
    from rush.records.tune import tuned_on

    if (tuned := tuned_on(file)) is None or started_rank() != 0:
        return
    from rush.hardware import probe

    machine = probe(recipe.run.device)
    if machine.fingerprint() != tuned[0]:
        note(
            f"{file} was tuned on another machine, or with other versions, than this one ({tuned[1]}; here: {machine.summary()}): "
            "it trains the same, but `rush tune` may find a faster one."
        )


def _folder(recipe: str | None, out: Path | None) -> Path:
    from rush.parallel.restarts import most_restarts

    if out is None and most_restarts() > 0:
        raise RecipeError(
            "torchrun may restart this run (--max-restarts), which must then find its folder; name it with --out."
        )
    return out or Path("runs") / f"{short_name(recipe or 'run')}-{time.strftime('%Y%m%d-%H%M%S')}"


def _recipe(recipe: str | None, changes: list[str], folder: Path) -> Recipe | None:
    """The recipe that the command names; None to resume the one in the folder."""
    from rush.recipe_io import load_recipe

    if recipe is not None:
        return load_recipe(recipe, changes, auto=True)
    return load_recipe(str(folder / "recipe.toml"), changes, auto=True) if changes else None


def _decided(recipe: Recipe | None, folder: RunFolder) -> Recipe | None:
    """The recipe with the micro batch that the run in the folder chose, where it is auto."""
    from rush.recipe_io import changed, load_recipe

    if recipe is None or not recipe.auto or not folder.holds_run():
        return recipe
    return changed(recipe, {"batch.micro": load_recipe(str(folder.recipe)).micro})


def _shrunk(recipe: Recipe) -> Recipe:
    """The recipe for the available ranks."""
    from rush.parallel import started_rank, started_world
    from rush.training.fewer_ranks import changes, shrunk

    fitting = shrunk(recipe, started_world())
    if fitting.world != recipe.world and started_rank() == 0:
        typer.secho(f"rush: {changes(recipe, fitting)}", err=True)
    return fitting


def start_ranks(
    nproc: str,
    restarts: int,
    recipe: str | None,
    changes: list[str],
    out: Path | None,
    resume: bool,
    json: bool,
    files: Sequence[Path] = (),
    until: int | None = None,
) -> None:
    """Run this command on several ranks; does not return. Invalid recipes are refused before a rank starts."""
    from rush.parallel import check_world
    from rush.parallel.launching import launch
    from rush.recipe_io import load_recipe
    from rush.records.run_folder import RunFolder, check_empty
    from rush.techniques import check_recipe
    from rush.techniques.api.own_files import check_remembered
    from rush.training.fewer_ranks import fewer_ranks

    refuse_nested(nproc)
    smallest, most = _numbers(nproc)
    folder = RunFolder(_folder(recipe, out))
    chosen = _recipe(recipe, changes, folder.path) or load_recipe(str(folder.recipe))
    check_world(chosen.layout.model_dump(), most)
    if resume:
        check_remembered(folder, chosen)
    if not chosen.auto:  # otherwise the ranks choose the micro batch first
        check_recipe(chosen)
    if not resume:
        check_empty(folder)  # only files written after the first start may be resumed
    words = ["train", *([recipe] if recipe else []), *changes, "--out", str(folder.path)]
    words += ["--resume"] * resume + ["--json"] * json + ["--debug"] * ("--debug" in sys.argv)
    words += ["--shrink"] * (smallest < most)
    words += [] if until is None else ["--until", str(until)]
    words += technique_words(files)
    code = launch(
        most,
        words,
        restarts=restarts,
        last_checkpoint=folder.checkpoints.steps,
        fewer=lambda world: fewer_ranks(_decided(chosen, folder) or chosen, world, smallest),
    )
    raise typer.Exit(code)


def _numbers(nproc: str) -> tuple[int, int]:
    """The fewest ranks to continue with, and the number to start with."""
    parts = nproc.split(":")
    if not all(re.fullmatch("[0-9]{1,9}", part) for part in parts) or len(parts) > 2:
        raise RecipeError(f"--nproc is {nproc!r:.80}; allowed: a number of ranks as in 8, or the fewest and the number as in 4:8.")  # fmt: skip
    smallest, most = int(parts[0]), int(parts[-1])
    if not 1 <= smallest <= most:
        raise RecipeError(f"--nproc is {nproc!r}; it takes at least one rank, and the fewest come first, as in 4:8.")  # fmt: skip
    return smallest, most
