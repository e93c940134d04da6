"""The files of a run, and the rules for opening a run folder.

A new run never mixes with an old one: starting in a folder that already has a run is refused, and so is
resuming without one. Both checks happen under the lock, so that two simultaneous starts cannot both find the
folder empty.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rush.errors import RecipeError
from rush.files import fsync_folder, remove_temporaries, writing
from rush.records.checkpoint_store import CheckpointStore
from rush.records.lock import FolderLock


@dataclass(frozen=True)
class _Entry:
    """A file or folder of the run, by its name."""

    name: str

    def __get__(self, folder: RunFolder, kind: object = None) -> Path:
        return folder.path / self.name


@dataclass(frozen=True)
class RunFolder:
    """The names inside a run folder. Making one touches nothing on the disk."""

    path: Path
    recipe = _Entry("recipe.toml")
    machine = _Entry("machine.json")
    techniques = _Entry("techniques.json")
    """The files of the run's own techniques, if any."""
    failures = _Entry("failure.log")
    """Tracebacks, one section for each failure."""
    last_failure = _Entry("failure.json")
    """Phase, step, techniques to blame and message of the last failure."""
    trying = _Entry("trying-micro.json")
    """The micro batch that is being tried, while `batch.micro=auto` looks for one."""
    metrics = _Entry("metrics.jsonl")
    samples = _Entry("samples.jsonl")
    saves = _Entry("saves.jsonl")
    trackers = _Entry("trackers.json")
    """The ids of the run in its trackers."""
    notes = _Entry("notes.jsonl")
    """Notes of the run: warnings, advice, the checkpoint it resumed from."""
    tokenizer = _Entry("tokenizer")
    report = _Entry("report.html")

    @property
    def checkpoints(self) -> CheckpointStore:
        return CheckpointStore(self.path / "checkpoints")

    def holds_run(self) -> bool:
        """Whether a run was started here: its recipe, its metrics or a checkpoint is there."""
        return any(map(os.path.exists, (self.recipe, self.metrics))) or bool(self.checkpoints.steps())


def check_empty(folder: RunFolder) -> None:
    """Refuse to start a run in a folder with another run or other files."""
    if folder.holds_run():
        raise RecipeError(
            f"{folder.path} already holds a run. Continue it with --resume, or choose another folder with --out."
        )
    own = {entry.name for entry in vars(RunFolder).values() if isinstance(entry, _Entry)} | {
        "checkpoints",
        "tensorboard",
        "wandb",
    }
    others = sorted(path.name for path in folder.path.glob("[!.]*") if path.name not in own)
    if others:
        named = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise RecipeError(
            f"{folder.path} is no run folder and holds other files ({named}); choose a new or an empty folder with --out."
        )


@contextlib.contextmanager
def new_run(path: Path) -> Iterator[RunFolder]:
    """A locked folder for a new run, created if need be; refused when it already holds one."""
    if os.path.exists(path) and not os.path.isdir(path):
        raise RecipeError(f"{path} is a file, not a folder. Give --out a folder for the run.")
    folder = RunFolder(path)
    if os.path.isdir(path):
        check_empty(folder)  # before a lock is left in a folder that is not ours; and again with the lock
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        fsync_folder(path.parent)
    with FolderLock(path):
        check_empty(folder)
        _clean(folder)
        yield folder


@contextlib.contextmanager
def resumed_run(path: Path) -> Iterator[RunFolder]:
    """The locked folder of an interrupted run, with the temporary files of its crash removed."""
    folder = existing_run(path)
    with FolderLock(path):
        _clean(folder)
        yield folder


def existing_run(path: Path) -> RunFolder:
    """A run folder to look at (generate, export, report), without a lock."""
    folder = RunFolder(path)
    if not os.path.isfile(folder.recipe):
        raise RecipeError(
            f"{path} holds no run (there is no recipe.toml in it). "
            "Give the folder of a run, or start a new one without --resume."
        )
    return folder


def _clean(folder: RunFolder) -> None:
    remove_temporaries(folder.path)
    folder.checkpoints.clean()
