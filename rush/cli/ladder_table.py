"""The table of a ladder in the terminal: speeds, gains, verdicts, and notes below it.

During the measurement it is never higher than the terminal: it hides rungs further away from the one being measured.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rush.cli.output import NAME, folded

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from rush.lab.ladder.climb import LadderProgress
    from rush.records.ladder import LadderRecord, RungRecord

COLORS = {"good": "green", "caution": "yellow", "bad": "red"}
"""Colors of the verdicts' tones; they add nothing to the words."""
SPARE = 1
"""Lines that stay free, for the cursor."""


def minutes(seconds: float) -> str:
    return time.strftime("%M:%S min", time.gmtime(seconds)) if seconds < 3600 else f"{seconds / 3600:.1f} h"


def fitting_table(progress: LadderProgress, console: Console) -> Table:
    """The table that fits the terminal, with the rung being measured; the full table when all are done."""
    rows, current = _rows(progress)
    if progress.doing is None:
        return ladder_table(progress)
    for shown in range(len(rows), 0, -1):
        first = max(0, min(len(rows) - shown, current))
        table = ladder_table(progress, range(first, first + shown))
        if len(console.render_lines(table)) + SPARE <= console.height:
            return table
    return ladder_table(progress, range(current, current + 1), caption=False)


def ladder_table(progress: LadderProgress, shown: range | None = None, *, caption: bool = True) -> Table:
    """The table; with `shown` only these rows, and how many there are before and after them."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    record = progress.record
    table = Table(
        title=_title(progress),
        title_justify="left",
        caption=caption_of(record) if caption else None,
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    kind = "trained/s" if record.get("counted") == "trained" else "tokens/s"
    for column in ("rung", f"{kind} ± 95 %", "gain", "cumulative", "memory\nGiB", "verdict"):
        justify: Any = "left" if column in ("rung", "verdict") else "right"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column == "rung" or "±" in column)
    rows, current = _rows(progress)
    shown = range(len(rows)) if shown is None else shown
    if shown.start:
        table.add_row(Text(f"… {shown.start} before", style="dim"))
    for number in shown:
        live = progress.doing is not None and number == current
        table.add_row(*rows[number], style="bold" if live else None)
    if after := len(rows) - shown.stop:
        table.add_row(Text(f"… {after} after", style="dim"))
    return table


def _rows(progress: LadderProgress) -> tuple[list[Sequence[Text]], int]:
    """The rows of the rungs that can run here, and the place of the one being measured (without one: the last)."""
    from rich.text import Text

    rungs = [rung for rung in progress.record["rungs"] if rung["verdict"] != "unsupported"]
    rows: list[Sequence[Text]] = [_texts(rung) for rung in rungs]
    doing = progress.doing
    current = next((at for at, rung in enumerate(rungs) if doing in _trials_of(rung)), None)
    if current is None and doing is not None:
        rows.append([Text(folded(doing, NAME)), *[Text("…")] * 5])
    return rows, len(rows) - 1 if current is None else current


def _trials_of(rung: RungRecord) -> tuple[str, ...]:
    """The progress texts that refer to this rung."""
    return rung["name"], f"a life of {rung['name']}", f"{rung['name']} again"


def _texts(rung: RungRecord) -> list[Text]:
    from rich.text import Text

    from rush.report.headlines import VERDICTS

    *figures, verdict = row_cells(rung)
    style = VERDICTS.get(rung["verdict"])
    figures[0] = folded(figures[0], NAME)
    return [*map(Text, figures), Text(verdict, style=COLORS.get(style.tone, "") if style else "")]


def row_cells(rung: RungRecord) -> list[str]:
    speed, gain, total = rung["tokens_per_s"], rung["gain"], rung["total_gain"]
    memory = rung["peak_memory_bytes"]
    spread = (speed["ci95"][1] - speed["ci95"][0]) / 2 if speed else 0.0
    return [
        rung["title"],
        f"{speed['median']:,.0f} ± {spread:,.0f}" if speed else "",
        f"{100 * (gain['ratio'] - 1):+.1f} %" if gain else "",
        f"×{total['ratio']:.2f}" if total else "",
        f"{memory / 2**30:.2f}" if memory else "",
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


def caption_of(record: LadderRecord) -> str | None:
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
