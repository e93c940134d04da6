"""Several ladders side by side: the same rungs on other machines, or on other versions.

Rungs are matched by name. How much faster one ladder is than the first is a ratio of medians; its interval is
conservative, from the lower end of one to the upper end of the other, which needs only the two intervals and
errs on the side of "cannot tell".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from rush.errors import RecipeError
from rush.files import write_atomic
from rush.records.gains import judge
from rush.report import bars, formatting
from rush.report.ladder import LadderView, RungView, careful_ratio, read_ladder
from rush.report.page import flattened, render


@dataclass(frozen=True)
class ComparedRung:
    """One ladder's rung inside a group of the same name."""

    letter: str
    series: int
    rung: RungView | None
    bar: Markup | None
    memory: Markup | None
    against_first: str


@dataclass(frozen=True)
class RungGroup:
    name: str
    title: str
    entries: tuple[ComparedRung, ...]


def write_comparison(ladders: list[Path], html: Path) -> None:
    """Draw two or more ladders side by side into one self-contained file."""
    if len(ladders) < 2:
        raise RecipeError(
            f"A comparison needs at least two ladders; {len(ladders)} given. Name another folder."
        )
    write_atomic(html, comparison_page([(path, read_ladder(path)) for path in ladders]))


def comparison_page(ladders: Sequence[tuple[Path, LadderView]]) -> str:
    read = [ladder for _, ladder in ladders]
    return render(
        "comparison.html",
        title="Ladders side by side",
        ladders=[
            (letter_of(at), series_of(at), _folder_name(path), ladder)
            for at, (path, ladder) in enumerate(ladders)
        ],
        groups=groups(read),
        machine_rows=_differences(read),
    )


def _folder_name(path: Path) -> str:
    """The display name of a ladder: the name of its folder."""
    place = path.resolve()
    return (place if place.is_dir() else place.parent).name or str(place)


def letter_of(index: int) -> str:
    """A, B … Z, AA, AB …"""
    word, rest = "", index
    while True:
        word = chr(ord("A") + rest % 26) + word
        rest = rest // 26 - 1
        if rest < 0:
            return word


def series_of(index: int) -> int:
    """Which of the six colors a ladder gets; its letter identifies it in any case."""
    return index % 6 + 1


def groups(ladders: Sequence[LadderView]) -> list[RungGroup]:
    """All rung names in the order they first appear, each with what every ladder has under it."""
    names = dict.fromkeys(rung.name for ladder in ladders for rung in ladder.rungs)
    every = [rung for ladder in ladders for rung in ladder.rungs]
    top = bars.top_speed([rung.speed for rung in every])
    memory = bars.top_memory(every)
    found = []
    for name in names:
        row = [ladder.rung(name) for ladder in ladders]
        title = next(rung.title for rung in row if rung)
        entries = []
        for at, rung in enumerate(row):
            who = f"{letter_of(at)}, {title}"
            bar = bars.speed_bar(rung.speed, top, who, kind=f"series-{series_of(at)}") if rung else None
            used = bars.memory_bar(rung.peak_memory_bytes, memory, who) if rung else None
            entries.append(
                ComparedRung(letter_of(at), series_of(at), rung, bar, used, _against(row[0], rung, at))
            )
        found.append(RungGroup(name, title, tuple(entries)))
    return found


def _against(base: RungView | None, rung: RungView | None, at: int) -> str:
    if at == 0 or base is None or rung is None or base.speed is None or rung.speed is None:
        return ""
    ratio, low, high = careful_ratio(rung.speed, base.speed)
    if low is None or high is None:
        return f"{formatting.ratio(ratio)} of A"
    judged = judge(low, high)
    tail = {"cannot tell": ", cannot tell", "no gain": ", no difference"}.get(judged, "")
    return f"{formatting.ratio(ratio)} of A ({formatting.digits(low)} to {formatting.digits(high)}{tail})"


def _differences(ladders: Sequence[LadderView]) -> list[tuple[str, list[str], bool]]:
    """The machines row by row, and whether a row differs."""
    tables = [dict(flattened(ladder.machine)) for ladder in ladders]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = []
    for name in names:
        values = [table.get(name, formatting.MISSING) for table in tables]
        rows.append((name, values, len(set(values)) > 1))
    return rows
