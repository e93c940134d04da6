"""`rush report`: write pages again from their records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rush.cli.options import Json
from rush.cli.output import echo, next_step, note, print_json
from rush.errors import RecipeError, RushError


def report(
    folders: Annotated[
        list[Path],
        typer.Argument(help="Folders of runs, ladders, searches, studies, benches or explanations."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="File for the page, with a single folder. Default: report.html in the folder."),
    ] = None,
    json: Json = False,
) -> None:
    """Write the page of a run, ladder, search, study, bench or explanation again, from its record.

    The record file determines the kind of a folder. Pages of unfinished ones show the results so far.

    Examples:

      rush report runs/gpt2

      rush report results/*

      rush report runs/ladder-tiny --out page.html
    """
    from rush.api import write_report

    if out is not None and len(folders) != 1:
        raise RecipeError(
            f"--out names one page, but {len(folders)} folders were given; name one folder, or leave --out out."
        )
    pages: dict[str, str] = {}
    refused: list[RushError] = []
    for folder in folders:
        try:
            pages[str(folder)] = str(write_report(folder, out))
        except RushError as error:  # one of many: the others are still written
            refused.append(error)
            continue
        if not json:
            echo(pages[str(folder)])
    if json:
        print_json(pages)
    elif pages:
        next_step("python3", "-m", "webbrowser", "-t", next(iter(pages.values())), why="or rush watch FOLDER")
    for other in refused[1:]:
        note(str(other))
    if refused:
        raise refused[0]
