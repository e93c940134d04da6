"""`rush tune`: search for the fastest recipe on this machine, with a live table."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rush.cli.ladder import resumable
from rush.cli.ladder_table import minutes
from rush.cli.options import (
    DataFiles,
    ExtraTechniques,
    Json,
    Overrides,
    RecipeName,
    complete_recipe,
    is_override,
    with_data,
)
from rush.cli.output import folded, next_step, note, print_json, say
from rush.ready import short_name
from rush.records.gains import judge, over_original
from rush.records.life import life_words
from rush.records.step_gap import parity_words
from rush.records.tune import TuneRecord, judged_again, proved, short_names

if TYPE_CHECKING:
    from rich.table import Table

    from rush.records.tune import CandidateRow
    from rush.tune.search import Doing

MOST_ROWS = 24
"""Maximum rows of the table; tune.json has all candidates."""
CANDIDATE = 26
"""Maximum width of the column of candidates; names are broken between knobs only."""
COLORS = {
    "won": "green",
    "ahead": "green",
    "different": "yellow",
    "no effect": "yellow",
    "unusable": "red",
    "failed": "red",
}
CROWDED = 1.5
"""Load average per core above which other processes disturbed the trials; a trial on a CPU itself causes about 1."""
TRIED = ("start", "ahead", "lost", "won", "failed", "different", "no effect", "unusable")


def tune(
    recipe: RecipeName = "tiny",
    overrides: Overrides = None,
    data: DataFiles = None,
    budget: Annotated[
        str,
        typer.Option(
            help="Time for the whole search, as in 90s, 20m or 1h, including the finished trials of an interrupted search."
        ),
    ] = "20m",
    objective: Annotated[
        str,
        typer.Option(
            help="tokens/s; memory: lowest peak memory at no less than --keep-speed of the recipe's own speed; cost: lowest cost "
            "per token at --price; longest-sequence: the longest that fits."
        ),
    ] = "tokens/s",
    out: Annotated[Path | None, typer.Option(help="Output folder. Default: runs/tune-RECIPE.")] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="Parity class of techniques to try: exact (bit for bit), close (up to rounding), statistical (same loss curve), "
            "changes (learns something else, as adapters do). May be repeated. Default: all but changes."
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option(help="Price of this machine per hour, in any currency.", min=0)
    ] = None,
    keep_speed: Annotated[
        float,
        typer.Option(
            help="With --objective memory: the lowest speed allowed, as a fraction of the recipe's own.",
            min=0,
            max=1,
        ),
    ] = 0.8,
    beside: Annotated[
        list[str] | None,
        typer.Option(
            help="A hand-written recipe to time against the winner after the search, by name or file, followed by overrides: "
            "'tiny techniques=[]'. Its techniques and micro batch are used. May be repeated.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    to_loss: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="After the search, race the winner with the unchanged recipe over this many tokens, with "
            "three seeds: how much sooner "
            "is the same loss reached? Takes the time of six runs, in addition to the budget.",
            min=1,
        ),
    ] = None,
    technique: ExtraTechniques = None,
    json: Json = False,
) -> None:
    """Search for the fastest recipe on this machine that still learns the same, prove it, and write it to a file.

    The planner prunes what cannot fit, short trials rank, longer trials decide, and the winner is compared with plain fp32. A
    candidate is rejected if its loss curve differs or one of its techniques has no effect. Tokens per step stay unchanged, as
    do LoRA and QLoRA of the recipe, which the reference uses too.

    An interrupted search resumes when you run the same command again. No trial is repeated.

    Examples:

      rush tune tiny --budget 5m

      rush tune llama-3.2-1b --budget 15m --out tuned/llama

      rush train tuned/llama/recipe.toml

      rush tune gpt2-124m --budget 15m --beside gpt2-124m-fast

      rush tune qlora --objective memory --keep-speed 0.5

      rush tune tiny --budget 5m --to-loss 204800
    """
    changes = with_data(overrides, data)
    if is_override(recipe):
        changes.insert(0, recipe)
        recipe = "tiny"
    from rush.api import tune_recipe

    folder = out or Path("runs") / f"tune-{short_name(recipe)}"
    with resumable(folder), _watching(quiet=json) as watch:
        record = tune_recipe(
            recipe,
            *changes,
            budget=budget,
            objective=objective,
            allow=allow,
            price=price,
            keep_speed=keep_speed,
            beside=beside or [],
            to_loss=to_loss,
            techniques=technique or [],
            out=folder,
            watch=watch,
            note=(lambda text: None) if json else note,
        ).record
    if json:
        print_json(record)
        return
    say(summary(record))
    if (load := record.get("load") or 0.0) > CROWDED:
        note(
            f"Other processes ran on this machine during the trials (load {load:.1f} per core): the gains may be noise. "
            "Search again when it is idle, with another --out."
        )
    typer.echo(f"Recipe: {folder / 'recipe.toml'}\nReport: {folder / 'report.html'}")
    words = ["rush", "train", str(folder / "recipe.toml")]
    words += [word for file in technique or [] for word in ("--technique", str(file))]
    next_step(*words)


def summary(record: TuneRecord) -> str:
    record = judged_again(record)
    winner = record["winner"]
    assert winner is not None
    parity = winner["parity"]
    proof = (
        f"parity with plain fp32: {parity_words(parity)} over {parity['steps']} steps"
        if parity
        else "not proved, because no time was left; give a larger --budget"
    )
    if life := winner.get("life"):
        proof += f"; short life {life_words(life).rstrip('.')}"
    rest = f"{_passed_over(record)}{_beside(winner)}"
    if winner["as_it_stood"]:
        return f"Nothing better was found and proved; the recipe stays unchanged ({proof}).{rest}"
    if not proved(winner):
        return f"No gain is proved. The search ended with {winner['what']} ({proof}).{rest}"
    words = [over_original(winner["gain"])] if winner["gain"] else []
    words.append(f"{winner['peak_memory_bytes'] / 2**30:.2f} GiB ({winner['memory_ratio']:.2f}×)")
    if "cost_per_million_tokens" in winner:
        words.append(f"{winner['cost_per_million_tokens']:.4g} per million tokens")
    if "sequence" in winner:
        words.append(f"sequences of {winner['sequence']:,} tokens")
    from rush.report.race_words import net_words

    net = net_words(winner.get("net"))
    return f"Won: {winner['what']}. {', '.join(words)}; {proof}.{f' {net}' if net else ''}{rest}"


def _passed_over(record: TuneRecord) -> str:
    """A sentence for each candidate that was rejected as unusable."""
    names = short_names(record.get("candidates", ()))
    return "".join(
        f" {names[row['key']]} was rejected: {row['reason'].rstrip('.')}."
        for row in record.get("candidates", ())
        if row["state"] == "unusable" and row.get("life")
    )


def _beside(winner: dict[str, Any]) -> str:
    """A sentence for each hand-written recipe."""
    sentences = ""
    for row in winner.get("beside", ()):
        if gain := row["gain"]:
            low, high = gain["ci95"]
            judged = {"no gain": ", no difference", "cannot tell": ", cannot tell"}.get(judge(low, high), "")
            sentences += f" {gain['ratio']:.3f}× ({low:.3f} to {high:.3f}) of {row['name']}{judged}."
        else:
            sentences += (
                f" {row['name']} could not be timed here: {row['status'].replace('_', ' ')}, {row['reason']}"
            )
    return sentences


@contextmanager
def _watching(quiet: bool) -> Iterator[Any]:
    """A live table; without a terminal one line per trial."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if quiet:
        yield lambda record, doing: None
        return
    if not console.is_terminal:
        yield _TuneLines(console)
        return
    jumps: dict[str, str] = {}

    def show(record: TuneRecord, doing: Doing | None) -> None:
        jumps.update(planned_parts(record))
        live.update(tune_table(record, doing), refresh=True)

    with Live(console=console, auto_refresh=False) as live:
        yield show
    for name, whole in jumps.items():
        console.print(f"{name}: {whole}", markup=False)


class _TuneLines:
    """One line per trial, and the table at the end."""

    def __init__(self, console: Any) -> None:
        self.console = console
        self.last: Doing | None = None
        self.described: set[str] = set()

    def __call__(self, record: TuneRecord, doing: Doing | None) -> None:
        if doing is None and record["finished"]:
            self.console.print(tune_table(record, None))
        elif doing is not None and doing != self.last:
            self.console.print(f"[{clock(record)}] {shortened(record, doing)}", markup=False)
            for name, whole in planned_parts(record):
                if name not in self.described:
                    self.console.print(f"  {name} is {whole}", markup=False)
                    self.described.add(name)
        self.last = doing


def shortened(record: TuneRecord, doing: Doing) -> str:
    """The running trial, with the short name of its candidate."""
    return doing.called(str(short_names(record["candidates"]).get(doing.candidate, doing.candidate)))


def planned_parts(record: TuneRecord) -> list[tuple[str, str]]:
    """The planner's recipes with all their parts, where the short name does not list them."""
    names = short_names(record["candidates"]).values()
    return [(name.short, name.whole) for name in names if name.whole]


def clock(record: TuneRecord) -> str:
    left = max(0.0, record["budget_s"] - record["spent_s"])
    return f"{minutes(left)} left"


def tune_table(record: TuneRecord, doing: Doing | None) -> Table:
    """The candidates in the order of their trials, then those that were not tried, with the reason."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    record = judged_again(record)
    state = "done" if record["finished"] else clock(record)
    if doing and not record["finished"]:
        state += f" · {shortened(record, doing)}"
    rest = [row for row in record["candidates"] if row["state"] not in TRIED]
    counts = {word: sum(row["state"] == word for row in rest) for word in ("pruned", "refused", "not tried")}
    names = short_names(record["candidates"])
    caption = ", ".join(f"{count} {word}" for word, count in counts.items() if count) or None
    if caption and record["finished"]:
        caption += "; report.html lists all"
    table = Table(
        title=f"{record['name']} · {record['objective']} · {state}",
        title_justify="left",
        caption=caption,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    kind = "trained/s" if record["counted"] == "trained" else "tokens/s"
    for column in ("candidate", kind, "over\nthe lead", "memory\nGiB", "result"):
        justify: Any = "left" if column in ("candidate", "result") else "right"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column == "candidate")
    tried = [row for row in record["candidates"] if row["state"] in TRIED]
    shown = [row for row in rest if row["state"] != "refused"][: max(0, MOST_ROWS - len(tried))]
    for row in [*tried, *(shown if record["finished"] else [])]:
        cells = list(map(Text, _cells(row, folded(str(names[row["key"]]), CANDIDATE))))
        cells[-1].stylize(COLORS.get(row["state"], ""))
        table.add_row(*cells)
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
        f"{memory / 2**30:.2f}" if memory else "",
        words.rstrip(": ")[:90],
    ]
