"""`rush ladder`: measure a ladder."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rush.cli.ladder_table import fitting_table, ladder_table
from rush.cli.options import ExtraTechniques, Json, complete_ladder, is_override
from rush.cli.output import next_step, note, print_json, print_table, say, watching
from rush.errors import RecipeError
from rush.ready import LADDERS

if TYPE_CHECKING:
    from rush.lab.ladder.climb import LadderProgress


def ladder(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A ladder's name (tiny, gpt2-124m, …) or .toml file; here: the ladder for this machine. "
            "Default: list all ladders.",
            autocompletion=complete_ladder,
        ),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Overrides of the base recipe, or of measure., parity., search."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Output folder. Default: runs/ladder-NAME.")] = None,
    view: Annotated[
        str, typer.Option(help="cumulative, alone, left_out, or all three with their interactions.")
    ] = "cumulative",
    race: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Afterwards race every rung of class STATISTICAL with the rung before it over this many "
            "tokens, with three seeds: net "
            "speedup in addition to its gain.",
            min=1,
        ),
    ] = None,
    technique: ExtraTechniques = None,
    json: Json = False,
) -> None:
    """Measure what every technique gains on this machine, and prove that the model still learns the same.

    Each rung is timed in fresh processes, profiled, and compared with plain fp32. An interrupted ladder resumes when you run
    the same command again.

    Examples:

      rush ladder here

      rush ladder tiny

      rush ladder llama-3.2-1b --out results/llama-1b --view all

      rush ladder tiny measure.processes=5 batch.micro=4

      rush ladder gpt2-124m --race 20000000
    """
    changes = list(overrides or [])
    if name is None:
        _list_ladders(json)
        return
    if is_override(name):
        raise RecipeError(f"rush ladder needs a ladder's name before {name!r}: {', '.join(LADDERS.names())}.")

    from rush.api import run_ladder
    from rush.lab.ladder.here import HERE, ladder_here
    from rush.lab.ladder.ladder_file import load_ladder

    if name == HERE:
        name, reason = ladder_here()
        note(reason)
    planned = load_ladder(name, changes)
    folder = out or Path("runs") / f"ladder-{planned.name}"
    notes = (lambda text: None) if json else note
    own = technique or []
    with resumable(folder), _watching(quiet=json) as watch:
        ladder = run_ladder(
            name, *changes, out=folder, view=view, race=race, techniques=own, watch=watch, note=notes
        )
    if json:
        print_json(ladder.record)
        return
    from rush.report.headlines import headline
    from rush.report.ladder import read_ladder
    from rush.report.race_words import net_words

    say(headline(read_ladder(folder)))
    for rung in ladder.record["rungs"]:
        if net := net_words(rung.get("net")):
            say(f"{rung['title']}: {net}")
    typer.echo(f"Record: {folder / 'ladder.json'}\nReport: {folder / 'report.html'}")
    if view in ("cumulative", "all"):
        _say_next(folder, planned.recipe)


def _list_ladders(json: bool) -> None:
    """The ready ladders, each with its description."""
    found = {name: str(LADDERS.read(LADDERS.find(name)).get("about", "")) for name in LADDERS.names()}
    if json:
        print_json([{"name": name, "about": about} for name, about in found.items()])
        return
    print_table(["ladder", "what it climbs"], [[name, about] for name, about in found.items()])
    next_step("rush", "ladder", "here", why="the one for this machine, in a few minutes")


def _say_next(folder: Path, recipe: str) -> None:
    """The recipes' paths, and the next command."""
    from rush.lab.ladder.proven import FASTEST, SMALLEST

    fastest, smallest = folder / FASTEST, folder / SMALLEST
    if smallest.is_file():
        typer.echo(f"Least memory: {smallest}")
    if fastest.is_file():
        typer.echo(f"Recipe: {fastest}")
        next_step("rush", "train", str(fastest))
    else:
        next_step("rush", "tune", recipe, "--budget", "10m", why="searches beyond these rungs")


def _watching(quiet: bool) -> AbstractContextManager[Any]:
    """A live table; without a terminal one line per trial, and the table at the end."""
    console = Console()

    def line(progress: LadderProgress) -> None:
        if progress.doing is None:
            console.print(ladder_table(progress))
        else:
            console.print(f"[{progress.done}/{progress.total}] {progress.doing}", markup=False)

    return watching(quiet, console, line, lambda progress: fitting_table(progress, console))


@contextmanager
def resumable(folder: Path, what: str = "trials") -> Iterator[None]:
    """Ctrl-C and SIGTERM end the running trial and all its processes; a note says how to resume."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        note(
            f"Stopped; all processes have ended. Finished {what} are kept: resume with the same command and --out {folder}."
        )
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
