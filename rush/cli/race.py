"""`rush race`: which recipe reaches the same loss sooner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rush.cli.ladder import resumable
from rush.cli.ladder_table import minutes
from rush.cli.options import ExtraTechniques, Json, complete_recipe
from rush.cli.output import echo, next_step, note, print_json, print_table, say
from rush.cli.ranks import refuse_nested

if TYPE_CHECKING:
    from rush.lab.race.racing import RaceProgress
    from rush.records.race import RaceRecord

MORE_SEEDS = 3


def race(
    recipes: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE [KEY=VALUE]... RECIPE [KEY=VALUE]...",
            help="Two or more recipes, by name or .toml file. KEY=VALUE after a recipe changes that recipe; "
            "before the first one, all "
            "of them.",
            autocompletion=complete_recipe,
        ),
    ],
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of every run; the schedules are set to that length. Default: the recipes' own length."
        ),
    ] = None,
    loss: Annotated[
        float | None, typer.Option(help="Stop a run once its validation loss is at or below this.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Time for the whole race, as in 90s, 20m or 1h: a round of legs that would exceed it is not started."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of every recipe, each with a different seed.")] = 1,
    legs: Annotated[int, typer.Option(help="Legs of a run; the recipes take turns leg by leg.")] = 4,
    points: Annotated[int, typer.Option(help="Validations per run, after the same tokens for all.")] = 20,
    nproc: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Ranks of every recipe, on this machine: the product of the layout's sizes. Default: for "
            "each recipe, the number its layout takes.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder. Default: runs/race-RECIPES.")] = None,
    technique: ExtraTechniques = None,
    json: Json = False,
) -> None:
    """Train recipes side by side, and measure which one reaches the same loss sooner.

    All start from the same seeds and read the same text. They take turns in legs of a few minutes or seconds,
    each a real `rush train`, so that a machine that slows down affects all of them. Validations, saves,
    compiling and warm-up do not count as training time. Gross is the ratio of tokens per second, net the
    ratio of the times to the same loss; with --seeds, both have an interval.

    An interrupted race resumes when you run the same command again, also with more --seeds. `rush watch
    FOLDER` shows the runs.

    Examples:

      rush race tiny tiny optimizer.lr=4e-3

      rush race schedule.warmup=0.05 gpt2-124m-fast gpt2-124m-fp8 --tokens 80_000_000 --seeds 3

      rush race schedule.warmup=10 tiny tiny techniques+=chunked_loss tiny optimizer.beta2=0.99 --budget 10m

      rush race mine.toml other.toml --tokens 50000000 --loss 3.5 --out races/mine

      rush race llama-3.2-1b llama-3.2-1b techniques+=muon layout.fsdp=8 --nproc 8 --tokens 500000000
    """
    from rush.api import race as race_recipes
    from rush.lab.race.contenders import read_contenders
    from rush.lab.race.race_plan import race_name

    if nproc is not None:
        refuse_nested(nproc)
    folder = out or Path("runs") / f"race-{race_name(read_contenders(recipes))}"
    with resumable(folder, "legs"), _watching(quiet=json) as watch:
        found = race_recipes(
            *recipes,
            tokens=tokens,
            loss=loss,
            budget=budget,
            seeds=seeds,
            legs=legs,
            points=points,
            nproc=nproc,
            techniques=technique or [],
            out=folder,
            watch=watch,
            note=(lambda text: None) if json else note,
        )
    if json:
        print_json(found.record)
        return
    _say(found.record, folder)
    given = {"--tokens": tokens, "--loss": loss, "--budget": budget, "--legs": legs if legs != 4 else None,
             "--points": points if points != 20 else None, "--nproc": nproc}  # fmt: skip
    words = [str(word) for option, value in given.items() if value is not None for word in (option, value)]
    words += [word for file in technique or [] for word in ("--technique", str(file))]
    _say_next(found.record, folder, [*recipes, *words])


def _say(record: RaceRecord, folder: Path) -> None:
    from rush.report.race_words import headline, warnings

    for one in record["contenders"]:
        echo(f"{one['letter']} {one['name']}")
    print_table(*race_table(record))
    say(headline(record))
    for warning in warnings(record):
        note(warning)
    typer.echo(f"Record: {folder / 'race.json'}\nReport: {folder / 'report.html'}")


def race_table(record: RaceRecord) -> tuple[list[str], list[list[str]]]:
    """Columns and rows, by letter: every contender with its speed, its last loss, and its tokens and time to the last common
    loss."""
    from rush.records.race_curves import mean_curve, raced
    from rush.report import formatting
    from rush.report.race_words import more_words, quotient_words, rate_of, verdict_of

    findings = {one["contender"]: one for one in record["findings"]}
    depth = record["depths"][-1] if record["depths"] else None
    rows = []
    for one in record["contenders"]:
        letter, found = one["letter"], findings.get(one["letter"])
        curve = mean_curve(list(raced(record, letter).values()))
        rows.append(
            [
                letter,
                formatting.si(rate_of(record, letter)),
                f"{curve[-1].loss:.4f}" if curve else "-",
                formatting.si(depth["tokens"].get(letter)) if depth else "-",
                formatting.seconds(depth["seconds"].get(letter)) if depth else "-",
                quotient_words(found["gross"]) if found else "",
                quotient_words(found["net"]) if found else "",
                more_words(found["more_tokens"]) if found else "",
                verdict_of(found) if found else "",
            ]
        )
    return [
        "recipe",
        "tok/s",
        "val",
        "tokens to",
        "time to",
        "gross",
        "net",
        "same loss",
        "verdict",
    ], rows


def _say_next(record: RaceRecord, folder: Path, words: Sequence[str]) -> None:
    from rush.report.race_words import winner_of

    winner = winner_of(record)
    if winner is not None:
        from rush.recipe_io import load_recipe

        recipe = folder / "recipes" / f"{winner}.toml"
        world = load_recipe(str(recipe)).world
        next_step("rush", "train", str(recipe), *(["--nproc", str(world)] if world > 1 else []))
        return
    seeds = max(MORE_SEEDS, len(record["seeds"]) + 2)
    why = "adds seeds to this race" if record["findings"] else "another race"
    next_step("rush", "race", *words, "--seeds", str(seeds), "--out", str(folder), why=why)


@contextmanager
def _watching(quiet: bool) -> Iterator[Any]:
    """One line per leg, with the validation loss of the leg before."""
    from rich.console import Console

    console = Console()

    def show(progress: RaceProgress) -> None:
        if progress.ended is not None:
            console.print(f"  {progress.ended}", markup=False, highlight=False)
        if progress.doing is None:
            return
        left = "" if progress.seconds_left is None else f" · about {minutes(progress.seconds_left)} left"
        console.print(
            f"[{progress.done}/{progress.total}] {progress.doing}{left}", markup=False, highlight=False
        )

    yield (lambda progress: None) if quiet else show
