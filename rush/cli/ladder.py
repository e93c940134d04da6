"""`rush ladder`: measure a ladder."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rush.cli.options import ExtraTechniques, Json, complete_ladder
from rush.cli.output import next_step, note, print_json, print_table
from rush.errors import RecipeError
from rush.ready import LADDERS

if TYPE_CHECKING:
    from rich.table import Table

    from rush.lab.ladder.climb import LadderProgress
    from rush.records.ladder import LadderRecord, RungRecord


def ladder(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A ladder's name (tiny, gpt2-124m, …) or .toml file; here: the one for this machine. Without one: the list of them.",
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
    """
    changes = list(overrides or [])
    if name is None:
        _list_ladders(json)
        return
    if "=" in name:
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
        ladder = run_ladder(name, *changes, out=folder, view=view, techniques=own, watch=watch, note=notes)
    if json:
        print_json(ladder.record)
        return
    from rush.report.headlines import headline
    from rush.report.ladder import read_ladder

    typer.echo(headline(read_ladder(folder)))
    typer.echo(f"Record: {folder / 'ladder.json'}\nReport: {folder / 'report.html'}")
    if view in ("cumulative", "all"):
        _say_next(folder, planned.recipe)


def _list_ladders(json: bool) -> None:
    """The ready ladders, and what each is about."""
    found = {name: str(LADDERS.read(LADDERS.find(name)).get("about", "")) for name in LADDERS.names()}
    if json:
        print_json([{"name": name, "about": about} for name, about in found.items()])
        return
    print_table(["ladder", "what it climbs"], [[name, about] for name, about in found.items()])
    next_step("rush", "ladder", "here", why="the one for this machine, in a few minutes")


def _say_next(folder: Path, recipe: str) -> None:
    """Where the recipes are, and what one would type next."""
    from rush.lab.ladder.proven import FASTEST, SMALLEST

    fastest, smallest = folder / FASTEST, folder / SMALLEST
    if smallest.is_file():
        typer.echo(f"Least memory: {smallest}")
    if fastest.is_file():
        typer.echo(f"Recipe: {fastest}")
        next_step("rush", "train", str(fastest))
    else:
        next_step("rush", "tune", recipe, "--budget", "10m", why="searches beyond these rungs")


@contextmanager
def _watching(quiet: bool) -> Iterator[Any]:
    """A live table; without a terminal one line per trial."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if quiet:
        yield lambda progress: None
        return
    if not console.is_terminal:
        yield _LadderLines(console)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield lambda progress: live.update(ladder_table(progress), refresh=True)


class _LadderLines:
    """One line per trial, and the table at the end."""

    def __init__(self, console: Any) -> None:
        self.console = console

    def __call__(self, progress: LadderProgress) -> None:
        if progress.doing is None:
            self.console.print(ladder_table(progress))
        else:
            self.console.print(f"[{progress.done}/{progress.total}] {progress.doing}", markup=False)


def ladder_table(progress: LadderProgress) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    record = progress.record
    table = Table(
        title=_title(progress),
        title_justify="left",
        caption=_caption(record),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    kind = "trained/s" if record.get("counted") == "trained" else "tokens/s"
    for column in ("rung", f"{kind} ± 95 %", "gain", "cumulative", "memory", "verdict"):
        justify: Any = "left" if column in ("rung", "verdict") else "right"
        # Wide enough at 80 columns that no word of a rung's name is cut.
        table.add_column(column, justify=justify, overflow="fold", min_width=15 if column == "rung" else None)
    for rung in record["rungs"]:
        if rung["verdict"] != "unsupported":
            table.add_row(*(Text(cell) for cell in _row(rung)))
    if progress.doing is not None and all(rung["name"] != progress.doing for rung in record["rungs"]):
        table.add_row(Text(progress.doing), *[Text("…")] * 5)
    return table


def _row(rung: RungRecord) -> list[str]:
    speed, gain, total = rung["tokens_per_s"], rung["gain"], rung["total_gain"]
    memory = rung["peak_memory_bytes"]
    spread = (speed["ci95"][1] - speed["ci95"][0]) / 2 if speed else 0.0
    return [
        rung["title"],
        f"{speed['median']:,.0f} ± {spread:,.0f}" if speed else "",
        f"{100 * (gain['ratio'] - 1):+.1f} %" if gain else "",
        f"×{total['ratio']:.2f}" if total else "",
        f"{memory / 2**30:.2f} GiB" if memory else "",
        rung["verdict"]
        if not rung["reason"] or (speed and rung["verdict"] != "unusable")
        else f"{rung['verdict']}: {rung['reason'][:60]}",
    ]


def _title(progress: LadderProgress) -> str:
    record = progress.record
    if progress.doing is None:
        return f"{record['name']} · {record['view']} · done"
    left = "" if progress.seconds_left is None else f" · about {minutes(progress.seconds_left)} left"
    return f"{record['name']} · {record['view']} · {progress.done} of {progress.total} trials{left} · {progress.doing}"


def _caption(record: LadderRecord) -> str | None:
    lines = [
        *_unable(record),
        *_drift(record),
        *_disturbed(record),
        *_paired(record),
        *_lives(record),
        *map(_length, record["sequence_limits"] or ()),
    ]
    return "\n".join(lines) or None


def _unable(record: LadderRecord) -> list[str]:
    """The rungs that cannot run here, in one line: the report has the reasons."""
    names = [rung["title"] for rung in record.get("rungs", ()) if rung.get("verdict") == "unsupported"]
    return [f"cannot run here: {', '.join(names)}"] if names else []


def _length(limit: Mapping[str, Any]) -> str:
    found = f"{limit['longest']:,} tokens" if limit["longest"] else "none"
    return f"the longest sequence with {' + '.join(limit['techniques']) or 'nothing'}: {found}, ended by {limit['ended_by']}"


BUSY = "MACHINE TOO BUSY to resolve smaller gains; run it again when nothing else runs"
UNEVEN = (
    "BATCHES TOO UNEVEN to resolve smaller gains: the two timings share too few batches to be paired, so this says nothing "
    "about the load of the machine"
)


def _drift(record: LadderRecord) -> list[str]:
    drift = record["drift"]
    if drift is None:
        return []
    moved, low, high = (f"{100 * (ratio - 1):+.1f} %" for ratio in (drift["ratio"], *drift["ci95"]))
    if drift["flagged"]:
        verdict = "DRIFT"
    elif drift.get("restless"):
        verdict = UNEVEN if drift.get("uneven") else BUSY
    else:
        verdict = "within its interval"
    how = f" on {paired} paired batches" if (paired := drift.get("paired")) else ""
    return [f"the first rung measured again{how}: {moved} ({low} to {high}), {verdict}"]


def _disturbed(record: LadderRecord) -> list[str]:
    """The rungs with a disturbed process."""
    found = [(rung["title"], rung.get("disturbed")) for rung in record.get("rungs", ())]
    return [
        f"{title}: one process was disturbed ({each['ratio']:.2f} of the others)"
        f"{', measured again' if each['again'] else ''}"
        for title, each in found
        if each
    ]


def _paired(record: LadderRecord) -> list[str]:
    """Which gains were computed from paired batches."""
    gains = [(rung["title"], rung["gain"]) for rung in record.get("rungs", ())]
    named = [title for title, gain in gains if gain and gain.get("paired")]
    if not named:
        return []
    which = "all gains" if len(named) == sum(gain is not None for _, gain in gains) else ", ".join(named)
    return [f"computed from paired batches: {which}"]


def _lives(record: LadderRecord) -> list[str]:
    """How many rungs passed their short life; the problem of every other one."""
    from rush.records.life import life_words

    lives = [(rung["title"], life) for rung in record.get("rungs", ()) if (life := rung.get("life"))]
    if not lives:
        return []
    well = sum(life["verdict"] == "ok" for _, life in lives)
    problems = [f"{title}: {life_words(life)}" for title, life in lives if life["verdict"] != "ok"]
    return [f"{well} of {len(lives)} rungs validated, sampled, saved and resumed", *problems]


def minutes(seconds: float) -> str:
    return time.strftime("%M:%S min", time.gmtime(seconds)) if seconds < 3600 else f"{seconds / 3600:.1f} h"


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the running trial and all its processes; a note says how to resume."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except KeyboardInterrupt:
        note(
            f"Stopped; no process is left. Finished trials are kept: resume with the same command and --out {folder}."
        )
        raise typer.Exit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
