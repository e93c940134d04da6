"""Commands that run on several ranks: refused options, and which rank reports an error."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from rush.errors import Diverged, Outage, RankLost, RecipeError, RushError


def refuse_nested(nproc: object) -> None:
    """A rank starts no ranks."""
    from rush.parallel import started_world

    if started_world() > 1:
        raise RecipeError(
            f"--nproc is {nproc}, but this is already one of {started_world()} ranks; leave --nproc out here."
        )


def technique_words(files: Sequence[Path]) -> list[str]:
    """The options that give ranks the same files of techniques."""
    return [word for file in files for word in ("--technique", str(file.expanduser().resolve()))]


@contextmanager
def one_message() -> Iterator[None]:
    """Report an error once: on rank 0, or on the rank that raised it where rank 0 cannot know of it."""
    if "RANK" not in os.environ:
        yield
        return
    from rush.parallel import report_absent, started_rank, started_world
    from rush.parallel.rendezvous import LEAVE_S
    from rush.parallel.restarts import failed_before, note_failure
    from rush.parallel.store_channel import FROM_RANK_0

    if (code := failed_before()) is not None:
        raise typer.Exit(code)
    try:
        yield
    except RushError as error:
        if isinstance(error, Outage):
            error.exit_code = RankLost.exit_code  # launchers restart all ranks
        note_failure(error.exit_code)
        rank = started_rank()
        if rank == 0 or started_world() == 1:
            raise
        began = time.monotonic()
        said = FROM_RANK_0 in getattr(error, "__notes__", ()) or report_absent(error)
        if not said and not isinstance(error, RecipeError | Diverged):
            typer.secho(f"error on rank {rank}: {error}", err=True, fg="red")
        else:
            # Launchers end all ranks as soon as one exits: let rank 0 report first.
            time.sleep(max(0.0, began + LEAVE_S - time.monotonic()))
        raise typer.Exit(error.exit_code) from None
