"""`rush tune`: find the fastest recipe for this machine, and show the search while it goes on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rush.cli.complete import complete_recipe
from rush.cli.ladder import minutes, stopped_by_sigterm
from rush.cli.output import Json, note, print_json
from rush.errors import RecipeError, nearest
from rush.ready import short_name
from rush.records.life import life_words
from rush.records.tune import LEAP, TuneRecord, short_names

if TYPE_CHECKING:
    from rich.table import Table

    from rush.records.tune import CandidateRow
    from rush.techniques import Parity

OBJECTIVES = ("tokens/s", "memory", "cost", "longest-sequence")
CLASSES = ("exact", "close", "statistical", "changes")
MOST_ROWS = 24
"""Of what was not tried; tune.json has all."""
CROWDED = 1.5
"""Load average per core above which others computed beside the trials: these make about one themselves, on a CPU."""
TRIED = ("start", "ahead", "lost", "won", "failed", "different", "no effect", "unusable")


def tune(
    recipe: Annotated[
        str, typer.Argument(help="A recipe's name or a .toml file.", autocompletion=complete_recipe)
    ] = "tiny",
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes of the recipe first.")
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            help="Time for the whole search, as in 90s, 20m or 1h; what finished trials of an interrupted one took counts."
        ),
    ] = "20m",
    objective: Annotated[
        str,
        typer.Option(
            help="tokens/s; memory: the least at no less than --keep-speed of the recipe's own speed; cost: the least money "
            "per token at --price; longest-sequence: the longest that fits."
        ),
    ] = "tokens/s",
    out: Annotated[
        Path | None, typer.Option(help="The search's folder; runs/tune-RECIPE without it.")
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="A class of techniques that may be put on: exact (the same bits), close (the same up to rounding), statistical "
            "(the same learning curve), changes (something else is learned, as with adapters). Without it all but changes."
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="What an hour of this machine costs, in your money.", min=0)
    ] = None,
    keep_speed: Annotated[
        float,
        typer.Option(
            help="With --objective memory, the least share of the recipe's own speed.", min=0, max=1
        ),
    ] = 0.8,
    beside: Annotated[
        list[str] | None,
        typer.Option(
            help="A recipe made by hand, by name or file (with changes behind it: 'tiny techniques=[]'), whose techniques and micro "
            "batch are timed beside the winner's when the search is over; may be given several times.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Search for the fastest recipe on this machine that still learns the same, prove it, and write it down.

    The planner prunes what cannot fit, short trials rank, longer ones decide, and the winner is held against plain fp32: one
    that learns something else, or part of which has no effect, is passed over. Tokens of a step stay what the recipe says.
    What the recipe itself changes about learning (LoRA, QLoRA) stays as it is, and the reference has it, too.

    A search that was interrupted goes on where it stopped: run the same command again. No trial is made twice.

    Examples:

      rush tune tiny --budget 5m

      rush tune llama-3.2-1b --budget 15m --out tuned/llama

      rush train tuned/llama/recipe.toml

      rush tune gpt2-124m --budget 15m --beside gpt2-124m-fast

      rush tune qlora --objective memory --keep-speed 0.5
    """
    changes = list(overrides or [])
    if "=" in recipe:
        changes.insert(0, recipe)
        recipe = "tiny"
    if objective not in OBJECTIVES:
        raise RecipeError(f"--objective is {objective!r}; allowed: {', '.join(OBJECTIVES)}.")
    if objective == "cost" and price is None:
        raise RecipeError("--objective cost needs --price: what an hour of this machine costs.")
    budget_s, classes = seconds(budget), _classes(allow)

    from rush.recipe_io import load_recipe
    from rush.report.tune import write_tune_report
    from rush.tune.goal import Goal
    from rush.tune.record import Request
    from rush.tune.tuning import tune as search

    chosen, name = load_recipe(recipe, changes, auto=True), short_name(recipe)
    folder = out or Path("runs") / f"tune-{name}"
    others = {}
    for one in beside or []:
        made, *more = one.split() or [""]
        others[" ".join([short_name(made), *more])] = load_recipe(made, more)
    request = Request(name, chosen, Goal(objective, keep_speed), classes, budget_s, price, others)
    try:
        with stopped_by_sigterm(), _watching(quiet=json) as watch:
            record = search(request, folder, watch=watch, note=(lambda text: None) if json else note)
    except KeyboardInterrupt:
        note(
            f"Stopped; no process is left. Finished trials are kept: the same command with --out {folder} goes on."
        )
        raise typer.Exit(130) from None
    write_tune_report(folder / "tune.json", folder / "report.html")
    if json:
        print_json(record)
        return
    typer.echo(said(record))
    if (load := record.get("load") or 0.0) > CROWDED:
        note(
            f"Others computed on this machine during the trials (load {load:.1f} per core): what looks like a gain may be theirs. "
            "Search again when it is quiet, with another --out."
        )
    typer.echo(f"Recipe: {folder / 'recipe.toml'}\nReport: {folder / 'report.html'}")
    typer.echo(f"Train it with: rush train {folder / 'recipe.toml'}")


def seconds(text: str) -> float:
    """A length of time, as in 90s, 20m, 1.5h; a bare number is seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?", text.strip())
    value = float(found[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600}[found[2] or "s"] if found else 0.0
    if value <= 0:
        raise RecipeError(f"--budget is {text!r}; allowed: a time above zero, as in 90s, 20m or 1h.")
    return value


def _classes(allow: list[str] | None) -> frozenset[Parity]:
    from rush.techniques import Parity

    words = allow or [word for word in CLASSES if word != "changes"]
    for word in words:
        if word.lower() not in CLASSES:
            raise RecipeError(f"--allow is {word!r}; {nearest(word, CLASSES)}")
    return frozenset(Parity[word.upper()] for word in words)


def said(record: TuneRecord) -> str:
    """The end of a search in a sentence or two."""
    winner = record["winner"]
    assert winner is not None
    parity = winner["parity"]
    proof = (
        f"parity with plain fp32: {parity['verdict']} over {parity['steps']} steps"
        if parity
        else "there was no time to prove it; give a larger --budget"
    )
    if life := winner.get("life"):
        proof += f"; short life {life_words(life).rstrip('.')}"
    rest = f"{_passed_over(record)}{_beside(winner)}"
    if winner["as_it_stood"]:
        return f"Nothing better was found and proved; the recipe stays as it was ({proof}).{rest}"
    words = []
    if gain := winner["gain"]:
        low, high = gain["ci95"]
        words.append(f"{gain['ratio']:.2f}× ({low:.2f} to {high:.2f}) the speed of the recipe as it stood")
    words.append(f"{winner['peak_memory_bytes'] / 2**30:.2f} GiB ({winner['memory_ratio']:.2f}×)")
    if "cost_per_million_tokens" in winner:
        words.append(f"{winner['cost_per_million_tokens']:.4g} per million tokens")
    if "sequence" in winner:
        words.append(f"sequences of {winner['sequence']:,} tokens")
    return f"Won: {winner['what']}. {', '.join(words)}; {proof}.{rest}"


def _passed_over(record: TuneRecord) -> str:
    """A sentence for each that would have won, were it not unusable."""
    names = short_names(record.get("candidates", ()))
    return "".join(
        f" {names[row['key']]} was passed over: {row['reason'].rstrip('.')}."
        for row in record.get("candidates", ())
        if row["state"] == "unusable" and row.get("life")
    )


def _beside(winner: dict[str, Any]) -> str:
    """A sentence for each recipe made by hand."""
    told = ""
    for row in winner.get("beside", ()):
        if gain := row["gain"]:
            low, high = gain["ci95"]
            told += f" {gain['ratio']:.3f}× ({low:.3f} to {high:.3f}) of {row['name']}."
        else:
            told += (
                f" {row['name']} could not be timed here: {row['status'].replace('_', ' ')}, {row['reason']}"
            )
    return told


@contextmanager
def _watching(quiet: bool) -> Iterator[Any]:
    """Shows the search as a table that fills up; one line per trial where there is no terminal."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if quiet:
        yield lambda record, doing: None
        return
    if not console.is_terminal:
        yield _TuneLines(console)
        return
    leaps: dict[str, str] = {}

    def show(record: TuneRecord, doing: str | None) -> None:
        leaps.update(made_of(record))
        live.update(tune_table(record, doing), refresh=True)

    with Live(console=console, auto_refresh=False) as live:
        yield show
    for name, whole in leaps.items():
        console.print(f"{name}: {whole}", markup=False)


class _TuneLines:
    """Progress as plain lines, and the table at the end."""

    def __init__(self, console: Any) -> None:
        self.console = console
        self.last: str | None = ""
        self.told: set[str] = set()

    def __call__(self, record: TuneRecord, doing: str | None) -> None:
        if doing is None and record["finished"]:
            self.console.print(tune_table(record, None))
        elif doing is not None and doing != self.last:
            self.console.print(f"[{clock(record)}] {shortened(record, doing)}", markup=False)
            for name, whole in made_of(record):
                if name not in self.told:
                    self.console.print(f"  {name} is {whole}", markup=False)
                    self.told.add(name)
        self.last = doing


def shortened(record: TuneRecord, doing: str) -> str:
    """What is being done, with a short name of its candidate."""
    names = short_names(record["candidates"])
    # One key may be the beginning of another: the longest that fits is meant.
    key = max((key for key in names if doing.startswith(key)), key=len, default="")
    return names.get(key, "") + doing.removeprefix(key)


def made_of(record: TuneRecord) -> list[tuple[str, str]]:
    """The recipes that were put together on paper, each with all it is made of where its name does not say it."""
    names = short_names(record["candidates"])
    return [
        (name, key.removeprefix(LEAP))
        for key, name in names.items()
        if key.startswith(LEAP) and ":" not in name
    ]


def clock(record: TuneRecord) -> str:
    left = max(0.0, record["budget_s"] - record["spent_s"])
    return f"{minutes(left)} left"


def tune_table(record: TuneRecord, doing: str | None) -> Table:
    """The search as it stands: what was tried, in the order of the trials, and why the rest was not."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    state = "done" if record["finished"] else clock(record)
    if doing and not record["finished"]:
        state += f" · {shortened(record, doing)}"
    rest = [row for row in record["candidates"] if row["state"] not in TRIED]
    counts = {word: sum(row["state"] == word for row in rest) for word in ("pruned", "refused", "not tried")}
    names = short_names(record["candidates"])
    caption = ", ".join(f"{count} {word}" for word, count in counts.items() if count) or None
    if caption and record["finished"]:
        caption += "; report.html has them all"
    table = Table(
        title=f"{record['name']} · {record['objective']} · {state}",
        title_justify="left",
        caption=caption,
        box=box.SIMPLE_HEAD,
    )
    kind = "trained/s" if record["counted"] == "trained" else "tokens/s"
    for column in ("candidate", kind, "over the lead", "memory", "what became of it"):
        table.add_column(column, justify="left" if column[0] in "cw" else "right", overflow="fold")
    tried = [row for row in record["candidates"] if row["state"] in TRIED]
    shown = [row for row in rest if row["state"] != "refused"][: max(0, MOST_ROWS - len(tried))]
    for row in [*tried, *(shown if record["finished"] else [])]:
        table.add_row(*(Text(cell) for cell in _cells(row, names[row["key"]])))
    return table


def _cells(row: CandidateRow, name: str) -> list[str]:
    speed, memory, ratio = row["tokens_per_s"], row["peak_memory_bytes"], row["ratio"]
    words = (
        row["reason"]
        if row["state"] in ("lost", "different", "no effect")
        else f"{row['state']}: {row['reason']}"
    )
    return [
        name,
        f"{speed['median']:,.0f}" if speed else "",
        f"×{ratio:.2f}" if ratio else "",
        f"{memory / 2**30:.2f} GiB" if memory else "",
        words.rstrip(": ")[:90],
    ]
