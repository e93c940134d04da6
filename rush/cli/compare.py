"""`rush compare`: runs and races, or ladders, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rush.cli.options import Json
from rush.cli.output import NAME, echo, folded, next_step, print_json, print_table, say
from rush.errors import RecipeError

if TYPE_CHECKING:
    from rush.records.ladder import RungRecord
    from rush.report.compare_runs import ComparedRun, RunComparison

LONGEST_VALUE = 30


def compare(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders of runs and races (a race alone is enough), or of two or more ladders."),
    ],
    out: Annotated[Path | None, typer.Option(help="Also write the comparison as an HTML page.")] = None,
    json: Json = False,
) -> None:
    """Compare runs and the recipes of races (tokens and time to the same loss, differences), or ladders rung by rung.

    Runs are compared at a loss that all of them reached: the highest final validation loss, or without
    validations the highest smoothed training loss. Recipes of a race also have gross and net, against the
    first one of their race.

    Examples:

      rush compare runs/plain runs/fast --out comparison.html

      rush compare runs/race-tiny runs/race-muon runs/plain --out comparison.html

      rush compare results/h200 results/a100 --out comparison.html
    """
    from rush.report.redraw import known_kind

    kinds = {str(folder): known_kind(folder) for folder in folders}
    if len(folders) < 2 and set(kinds.values()) != {"race"}:
        raise RecipeError(
            "a comparison needs one race, or at least two folders of runs and races, or of ladders."
        )
    if set(kinds.values()) <= {"run", "race"}:
        _runs(folders, out, json)
    elif set(kinds.values()) == {"ladder"}:
        _ladders(folders, out, json)
    else:
        found = ", ".join(f"{folder} ({kind})" for folder, kind in kinds.items())
        raise RecipeError(f"a comparison takes runs and races, or ladders, and not both: found {found}. Name folders of one of these kinds.")  # fmt: skip


def _runs(folders: list[Path], out: Path | None, json: bool) -> None:
    from rush.report.compare_runs import compare_runs, write_run_comparison

    found = compare_runs(folders)
    if out is not None:
        write_run_comparison(found, out)
    if json:
        print_json(found.as_json())
        return
    columns = ["run", "step", "loss", "val", "tok/s", "tokens to", "time to", "ratio"]
    rows = [_run_row(one, found.runs[0]) for one in found.runs]
    if found.races:
        for one in found.runs:
            echo(f"{one.letter} {one.run.name}")
        columns, rows = _with_races(columns, rows, found)
    print_table(columns, rows)
    for line in run_words(found):
        say(line)
    _say_next(folders, out)


def _with_races(
    columns: list[str], rows: list[list[str]], found: RunComparison
) -> tuple[list[str], list[list[str]]]:
    """The table with gross, net and verdict of contenders; a ratio only where there are several folders."""
    kept = [
        name for name in columns if name not in ("step", "loss") and (name != "ratio" or found.sources > 1)
    ]
    places = [columns.index(name) for name in kept]
    wide = [
        [
            one.letter,
            *(row[place] for place in places[1:]),
            *(one.of_race(key) for key in ("gross", "net")),
            one.verdict,
        ]
        for one, row in zip(found.runs, rows, strict=True)
    ]
    return [*kept, "gross", "net", "verdict"], wide


def _run_row(one: ComparedRun, first: ComparedRun) -> list[str]:
    from rush.report import formatting

    row, reached = one.row, one.reached
    ratio = ""
    if reached is not None and first.reached is not None and reached[2] and one is not first:
        ratio = f"{first.reached[2] / reached[2]:.2f}×"
    return [
        f"{one.letter} {_short(one.run.name, 18)}",
        f"{row['step']:,}",
        "-" if row["loss"] is None else f"{row['loss']:.4f}",
        "-" if row["val_loss"] is None else f"{row['val_loss']:.4f}",
        "-" if row["tokens_per_s"] is None else formatting.si(row["tokens_per_s"]),
        "-" if reached is None else formatting.si(reached[1]),
        "-" if reached is None else _clock(reached[2]),
        ratio,
    ]


def run_words(found: RunComparison) -> list[str]:
    """What the columns say, and the differences of the recipes, in lines of 80 characters."""
    lines = []
    if found.target is not None:
        lines.append(f'"to": until a {found.what} of {found.target:.4f}, which all of them reached.')
        if found.sources > 1:
            lines.append(
                f"ratio: the time of {found.runs[0].letter} over that of the run; time is the sum of step times."
            )
    if found.races:
        lines.append("gross, net: tokens per second, and time to the same loss, within a race.")
    lines += found.notes
    if not found.differences:
        return [*lines, f"Differences of the recipes: {found.without_differences}"]
    lines.append("Differences of the recipes:")
    for key, values in found.differences:
        each = [
            f"{one.letter} {_short(value, LONGEST_VALUE)}"
            for one, value in zip(found.runs, values, strict=True)
        ]
        line = f"  {key}: {' · '.join(each)}"
        lines += [line] if len(line) <= 80 else [f"  {key}:", *(f"    {part}" for part in each)]
    return lines


def _clock(seconds: float) -> str:
    """`48.3 s`, `6:50`, `1:02:03`."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _ladders(folders: list[Path], out: Path | None, json: bool) -> None:
    from rush.records.ladder import read_ladder
    from rush.report.compare import write_comparison

    records = {str(folder): read_ladder(folder) for folder in folders}
    names = list(dict.fromkeys(rung["name"] for record in records.values() for rung in record["rungs"]))
    found = {folder: {rung["name"]: rung for rung in record["rungs"]} for folder, record in records.items()}
    if out is not None:
        write_comparison(folders, out)
    if json:
        keys = ("tokens_per_s", "total_gain", "peak_memory_bytes", "verdict", "status")
        rows = {
            name: {f: {k: r[name].get(k) for k in keys} for f, r in found.items() if name in r}
            for name in names
        }
        print_json(rows)
        return
    print_table(
        ["rung", *_titles(folders)],
        [[folded(name, NAME), *(cell(rungs.get(name)) for rungs in found.values())] for name in names],
    )
    _say_next(folders, out)


def _say_next(folders: list[Path], out: Path | None) -> None:
    if out is None:
        next_step(
            "rush",
            "compare",
            *map(str, folders),
            "--out",
            "comparison.html",
            why="as a page, with the curves",
        )
        return
    echo(f"Report: {out}")
    next_step("rush", "watch", *map(str, folders), why="the same live in a browser")


def _titles(folders: list[Path]) -> list[str]:
    """The folders' own names where they differ; otherwise their paths."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else list(dict.fromkeys(map(str, folders)))


def cell(rung: RungRecord | None) -> str:
    if rung is None:
        return "-"
    from rush.records.gains import interval_of, judge, judged_again

    speed, total, gain = (rung.get(key) for key in ("tokens_per_s", "total_gain", "gain"))
    ends = interval_of(total)
    ratio = total.get("ratio") if isinstance(total, dict) else None
    real = isinstance(ratio, float) and ends is not None and judge(*ends) in ("faster", "slower")
    times = f" ×{ratio:.2f}" if real else ""
    verdict = judged_again(rung["verdict"], gain, rung.get("parity"))
    return f"{speed['median']:,.0f} tokens/s{times}, {verdict}" if isinstance(speed, dict) else verdict
