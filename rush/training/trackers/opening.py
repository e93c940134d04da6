"""The trackers of a recipe: check them before the first step, open them, print how to view them."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rush.errors import MachineError, RushError
from rush.files import shareable, write_json_atomic
from rush.recipe import Recipe, tracker_name
from rush.records.run_folder import RunFolder
from rush.training.trackers.contract import TrackedRun
from rush.training.trackers.feed import Trackers


def check_trackers(recipe: Recipe) -> None:
    """Refuse trackers whose library is not installed, or that would stop and ask for a login."""
    for entry in recipe.run.trackers:
        name = tracker_name(entry)
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a folder of that name is no library
            raise MachineError(
                f"run.trackers names {name}, which is not installed. Run: pip install 'optimization-rush[{name}]', or leave it out "
                f"with run.trackers-={entry}."
            )
        _module(name).check()


def open_trackers(
    recipe: Recipe, folder: RunFolder, first_step: int, *, resumed: bool, note: Callable[[str], None]
) -> Trackers:
    """The trackers of the recipe, each continuing its run where this one is resumed."""
    known = _ids(folder.trackers) if resumed else {}
    opened = []
    for entry in recipe.run.trackers:
        name, _, project = entry.partition(":")
        run = TrackedRun(recipe, folder.path, first_step, project or None, known.get(entry))
        try:
            tracker = _module(name).open_tracker(run)
        except RushError:
            raise
        except (
            Exception
        ) as error:  # any error of a library: an unreachable server, a store of another version
            told = shareable(f"{type(error).__name__}: {error}").splitlines()[0]
            raise MachineError(
                f"the tracker {name} could not be opened ({told.rstrip('.')}). Fix that, or leave it out with "
                f"run.trackers-={entry}."
            ) from error
        opened.append((name, tracker))
        known[entry] = tracker.id
    if set(known) - {"tensorboard"}:
        write_json_atomic(folder.trackers, known)
    return Trackers(opened, note)


def where_to_look(recipe: Recipe, folder: Path) -> list[str]:
    """The command or address to view every tracker of the recipe."""
    found = []
    for entry in recipe.run.trackers:
        name, _, project = entry.partition(":")
        found.append(_module(name).where_to_look(folder, project or None))
    return found


def _module(name: str) -> Any:
    return importlib.import_module(f"rush.training.trackers.to_{name}")


def _ids(path: Path) -> dict[str, str]:
    """The ids of the trackers' runs; without a valid file new ones start."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text("utf-8"))
        if isinstance(found, dict):
            return {str(name): value for name, value in found.items() if isinstance(value, str)}
    return {}
