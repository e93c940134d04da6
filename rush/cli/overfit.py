"""`rush overfit`: can this configuration learn at all?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rush.cli.options import DataFiles, ExtraTechniques, Json, Overrides, RecipeName, with_data
from rush.cli.output import echo, next_step, note, print_json
from rush.cli.ranks import one_message, refuse_nested, technique_words

if TYPE_CHECKING:
    from rush.evaluate.overfit import Verdict
    from rush.recipe import Recipe


def overfit(
    recipe: RecipeName,
    overrides: Overrides = None,
    data: DataFiles = None,
    steps: Annotated[int, typer.Option(help="Maximum steps on the one batch.", min=10)] = 300,
    nproc: Annotated[
        int | None,
        typer.Option(help="Ranks to start on this machine: the product of the layout's sizes.", min=1),
    ] = None,
    technique: ExtraTechniques = None,
    json: Json = False,
) -> None:
    """Overfit one batch to near-zero loss, and report whether this configuration can learn, with reasons.

    Checks the labels (masking, shift), which parameters are trained and get a gradient, whether the precision rounds the
    updates away, and the learning rate: if the loss does not reach the target, 10× higher and lower rates are tried. The
    peak learning rate is used from the first step; nothing is written. The target is a loss of at most 0.05 nats, and at
    most 5 % of the first, above the entropy floor of the batch. Exit code 0 if it can learn, 5 if not.

    With --nproc, or under torchrun, the batch is one micro batch of each data rank.

    Examples:

      rush overfit tiny

      rush overfit sft-tiny optimizer.lr=1e-6

      rush overfit dpo-tiny model.init_from=runs/sft-tiny data.tokenizer=model batch.micro=2

      rush overfit tiny layout.fsdp=2 --nproc 2
    """
    from rush.evaluate.overfit import overfit_recipe
    from rush.parallel import started_rank, started_world
    from rush.recipe_io import load_recipe
    from rush.techniques.api.own_files import added
    from rush.training.failures import Phase, RunStatus, reporting_failures

    changes, files = with_data(overrides, data), technique or []
    with one_message(), added(files):
        chosen = load_recipe(recipe, changes)
        if nproc is not None:
            words = [recipe, *changes, "--steps", str(steps), *["--json"] * json]
            _start_ranks(chosen, nproc, words, files)
        status = RunStatus(None, chosen, phase=Phase.ONE_BATCH)
        with reporting_failures(status):
            verdict = overfit_recipe(chosen, steps, (lambda text: None) if json else note, status)
    if started_rank() != 0:
        return  # rank 0 reports, also by its exit code
    if json:
        print_json(asdict(verdict))
    else:
        _show(verdict)
        if verdict.can_learn:
            many = ["--nproc", str(started_world())] if started_world() > 1 else []
            next_step("rush", "train", recipe, *changes, *many)
    raise typer.Exit(0 if verdict.can_learn else 5)


def _start_ranks(recipe: Recipe, nproc: int, words: Sequence[str], files: Sequence[Path]) -> None:
    """Run this command on several ranks; does not return."""
    from rush.parallel import check_world
    from rush.parallel.launching import launch
    from rush.techniques import check_recipe

    refuse_nested(nproc)
    check_world(recipe.layout.model_dump(), nproc)
    check_recipe(recipe)
    debug = ["--debug"] * ("--debug" in sys.argv)
    raise typer.Exit(launch(nproc, ["overfit", *words, *technique_words(files), *debug], resumable=False))


def _show(verdict: Verdict) -> None:
    from rush.evaluate.overfit import MOST_LEFT, NEAR_ZERO
    from rush.training.view import sparkline

    if verdict.losses:
        curve = sparkline(list(verdict.losses), 60)
        typer.echo(
            f"loss {verdict.losses[0]:.4f} {curve} {verdict.losses[-1]:.4f}  ({len(verdict.losses)} steps)"
        )
        typer.echo(
            f"near zero is at most {verdict.target:.4f} here: no model gets below {verdict.floor:.4f} on this batch, and "
            f"{NEAR_ZERO:g} nats may be left (or {MOST_LEFT:.0%} of what there was to lose, where that is less)"
        )
    for check in verdict.checks:
        mark, colour = ("ok ", "green") if check.good else ("bad", "red")
        typer.secho(mark, fg=colour, nl=False)
        echo(f" {check.name + ':':<12} {check.what}")
    echo(verdict.reason, fg="green" if verdict.can_learn else "red", bold=True)
