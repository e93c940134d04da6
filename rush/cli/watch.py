"""`rush watch`: the runs under a folder, live in a browser."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from rush.cli.output import echo
from rush.errors import RecipeError


def watch(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders of runs, or a run folder. Default: runs/.")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1. Default: a free one.")] = 0,
) -> None:
    """Show runs, ladders, searches and scaling studies live in a browser.

    Prints a local address that contains a token: only someone with the address has access. The page overlays
    curves of several runs, with samples and status, and shows a new row within two seconds. It only reads;
    Ctrl-C stops it.

    Examples:

      rush watch

      rush watch runs/gpt2 --port 8123

      rush watch runs results
    """
    from rush.watch.server import Server, over_ssh

    chosen = folders or [Path("runs")]
    for folder in chosen:
        if not os.path.isdir(folder):
            raise RecipeError(f"there is no folder {folder}; name the folder of a run or one with runs in it, as in rush watch runs.")  # fmt: skip
    with Server(chosen, port) as server:
        echo(f"Watch {', '.join(map(str, chosen))} at {server.url}")
        echo(over_ssh(server.port))
        echo("Ctrl-C ends it.")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            echo("Stopped watching; the runs continue.")
