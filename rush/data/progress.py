"""A progress bar for preparation: a callback for `prepare`, drawn with rich."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from rush.data.prepare import Progress


@contextlib.contextmanager
def progress_bar(console: Console | None = None) -> Iterator[Callable[[Progress], None]]:
    """Use as `with progress_bar() as show: prepare(…, progress=show)`. Shown from the first report on."""
    columns = (
        TextColumn("Preparing data"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[documents]:,} documents, {task.fields[tokens]:,} tokens"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    # On stderr, so that stdout is clean for JSON.
    with Bar(*columns, console=console or Console(stderr=True)) as bar:
        task = bar.add_task("prepare", total=None, visible=False, documents=0, tokens=0)

        def show(now: Progress) -> None:
            bar.update(
                task,
                total=now.total_units,
                completed=now.units,
                documents=now.documents,
                tokens=now.tokens,
                visible=True,
            )

        yield show
