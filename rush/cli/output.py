"""Output shared by the commands: JSON, tables, notes on standard error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

Json = Annotated[bool, typer.Option("--json", help="Print one JSON value on standard output.")]

ExtraTechniques = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="A Python file that defines a technique for the recipe to use; its code is executed. May be repeated.",
    ),
]


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(columns: list[str], rows: list[list[str]], title: str | None = None) -> None:
    """A table on standard output; columns of numbers are right-aligned."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        numeric = all(row[index][:1].isdigit() or row[index] in ("", "-") for row in rows)
        table.add_column(name, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table, markup=False)


def note(text: str) -> None:
    """A message to the user, on standard error."""
    typer.secho(text, err=True, fg="yellow")
