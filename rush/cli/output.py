"""Output shared by the commands: JSON, tables, notes on standard error."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from rush.errors import printable, readable

NAME = 22
"""The widest column of names; a technique's has up to 20 letters."""
_UNESCAPED = re.compile("[\x7f-\x9f\ud800-\udfff]")
"""Control characters and halves of surrogate pairs that json.dumps writes as they are."""


def print_error(message: str) -> None:
    """One message on standard error, without control characters and of bounded length."""
    typer.secho(f"error: {readable(message)}", err=True, fg="red")


def echo(text: str = "", **style: Any) -> None:
    """A line on standard output that may contain untrusted text: control characters are escaped."""
    typer.secho(printable(text), **style)


def say(text: str, **style: Any) -> None:
    """Prose on standard output, wrapped between words if the width is known: a terminal would break names."""
    console = Console()
    if console.is_terminal or "COLUMNS" in os.environ:
        text = "\n".join(_wrapped(line, console.width) for line in text.split("\n"))
    echo(text, **style)


def _wrapped(line: str, width: int) -> str:
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(
        line,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )


def folded(name: str, width: int) -> str:
    """A name in lines of at most this width, broken only between knobs and words."""
    lines = [""]
    for part in re.findall(r"[^\s(,]+[(,)]*\s*|\s+|[(,]", name):
        if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def write_piece(text: str) -> None:
    """A piece of a text that is written as it comes, as by `echo`."""
    sys.stdout.write(printable(text))
    sys.stdout.flush()


def print_json(value: Any) -> None:
    """JSON on standard output, which holds every text exactly: control characters are escaped."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    typer.echo(_UNESCAPED.sub(lambda found: f"\\u{ord(found.group()):04x}", text))


def print_table(columns: list[str], rows: list[list[str]], title: str | None = None) -> None:
    """A table on standard output; columns of numbers are right-aligned."""
    title = None if title is None else printable(title)
    columns = list(map(printable, columns))
    rows = [[*map(printable, row), *[""] * (len(columns) - len(row))] for row in rows]
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    words = [max((len(word) for row in [columns, *rows] for word in row[index].split()), default=0) for index in range(len(columns))]  # fmt: skip
    whole = sum(words) + 2 * len(words) <= Console().width  # then no word is cut
    for index, name in enumerate(columns):
        numeric = all(row[index][:1].isdigit() or row[index] in ("", "-") for row in rows)
        least = words[index] if whole else min(words[index], NAME)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold", min_width=least)
    for row in rows:
        table.add_row(*row)
    Console().print(table, markup=False)


@contextmanager
def measuring_bar(refresh_per_second: float = 10) -> Iterator[Callable[[str, int, int], None]]:
    """A transient progress bar on standard error: show(what, done, total)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("Measuring {task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, refresh_per_second=refresh_per_second) as bar:
        task = bar.add_task("", total=None, visible=False)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total, visible=True)

        yield show


@contextmanager
def watching(
    quiet: bool, console: Console, line: Callable[..., None], table: Callable[..., Any]
) -> Iterator[Callable[..., None]]:
    """The progress display of a long command: a live table; without a terminal one line per trial; nothing if `quiet`."""
    from rich.live import Live

    if quiet:
        yield lambda *progress: None
    elif not console.is_terminal:
        yield line
    else:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda *progress: live.update(table(*progress), refresh=True)


def next_step(*words: str, why: str = "") -> None:
    """Print the suggested next command, as the last line."""
    echo(f"Next: {shlex.join(words)}{f'   # {why}' if why else ''}")


def note(text: str) -> None:
    """A message to the user, on standard error."""
    typer.secho(printable(text), err=True, fg="yellow")
