"""`rush overfit`: can this configuration learn at all?"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from rush.cli.options import DataFiles, ExtraTechniques, Json, Overrides, RecipeName, with_data
from rush.cli.output import echo, next_step, note, print_json


def overfit(
    recipe: RecipeName,
    overrides: Overrides = None,
    data: DataFiles = None,
    steps: Annotated[int, typer.Option(help="Maximum steps on the one batch.", min=10)] = 300,
    technique: ExtraTechniques = None,
    json: Json = False,
) -> None:
    """Overfit one batch to near-zero loss, and report whether this configuration can learn, with reasons.

    Checks the labels (masking, shift), which parameters are trained and get a gradient, whether the precision rounds the
    updates away, and the learning rate: 10× higher and lower are tried where the loss does not reach the target. The peak
    learning rate is used from the first step; nothing is written. The target is a loss of at most 0.05 nats, and at most 5 %
    of the first, above the entropy floor of the batch. Exit code 0 if it can learn, 5 if not.

    Examples:

      rush overfit tiny

      rush overfit sft-tiny optimizer.lr=1e-6

      rush overfit dpo-tiny model.init_from=runs/sft-tiny data.tokenizer=model batch.micro=2
    """
    from rush.evaluate.overfit import MOST_LEFT, NEAR_ZERO, overfit_recipe
    from rush.recipe_io import load_recipe
    from rush.techniques.api.own_files import added
    from rush.training.failures import Phase, RunStatus, reporting_failures
    from rush.training.view import sparkline

    changes = with_data(overrides, data)
    chosen = load_recipe(recipe, changes)
    with added(technique or []), reporting_failures(RunStatus(None, chosen, phase=Phase.ONE_BATCH)):
        verdict = overfit_recipe(chosen, steps, (lambda text: None) if json else note)
    if json:
        print_json(asdict(verdict))
    else:
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
        if verdict.can_learn:
            next_step("rush", "train", recipe, *changes)
    raise typer.Exit(0 if verdict.can_learn else 5)
