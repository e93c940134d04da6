"""The store of checkpoints: `checkpoints/step-000123/`, sealed folders that appear atomically.

A checkpoint is written under a hidden name. Once every file is fsynced and hashed and the manifest is written, one rename gives
it its real name. So a folder with a real name was complete when it got it; `verify` finds later damage. Deletion is the
reverse: hide by a rename, then remove, so that a crash leaves temporary files and never a partial checkpoint. The store knows
nothing about tensors; the caller writes the files between `begin` and `commit`. One writer at a time: hold the run folder's
lock.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rush.files import fsync_file, fsync_folder, write_atomic, writing
from rush.records.checkpoint_manifest import (
    MANIFEST_NAME,
    CheckpointDamaged,
    CheckpointManifest,
    FileEntry,
    check_contents,
    check_sizes,
    describe_files,
    folder_name,
    read_manifest,
)

OnDamaged = Callable[[Path, str], None]

_WRITING, _REPLACED, _DELETED = ".writing-", ".replaced-", ".deleted-"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder that was verified to the last byte."""

    path: Path
    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def meta(self) -> Mapping[str, Any]:
        return self.manifest.meta


def verify(folder: Path) -> Checkpoint:
    """Read every byte of a checkpoint; CheckpointDamaged names the first file that is not as sealed. Several ranks divide the
    files among them (`rush/checkpoint/verification.py`)."""
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    check_contents(folder, manifest)
    return Checkpoint(folder, manifest)


@dataclass(frozen=True)
class CheckpointStore:
    """All checkpoints of a run, in one folder (created by the first save)."""

    folder: Path

    def begin(self, step: int) -> Path:
        """A fresh hidden folder to write the files of step's checkpoint into."""
        temporary = self._hidden(_WRITING, step)
        with writing(temporary):
            if not self.folder.is_dir():
                self.folder.mkdir(parents=True)
                fsync_folder(self.folder.parent)
            _remove(temporary)
            temporary.mkdir()
        return temporary

    def commit(
        self, step: int, meta: Mapping[str, Any], known: Mapping[str, FileEntry] | None = None
    ) -> Path:
        """Seal what was written since `begin` and name it; an older folder of that step is replaced.

        `known` are files that their writers hashed and forced to the disk themselves.
        """
        temporary, final = self._hidden(_WRITING, step), self.path(step)
        with writing(temporary):
            files = describe_files(temporary, known or {})
            for name in files.keys() - (known or {}).keys():
                fsync_file(temporary / name)
        write_atomic(temporary / MANIFEST_NAME, CheckpointManifest(step, files, meta).render())
        with writing(final):
            old = self._hidden(_REPLACED, step)
            if final.exists():
                _remove(old)
                os.rename(final, old)
            os.rename(temporary, final)
            fsync_folder(self.folder)
            _remove(old)
        return final

    def discard(self, step: int) -> None:
        """Discard what `begin` started, if it was not committed."""
        temporary = self._hidden(_WRITING, step)
        with writing(temporary):
            _remove(temporary)

    def path(self, step: int) -> Path:
        return self.folder / folder_name(step)

    def steps(self) -> list[int]:
        """The steps of all folders with a checkpoint's name, rising, good or not."""
        if not os.path.isdir(self.folder):
            return []
        found = (_step_of(entry.name) for entry in os.scandir(self.folder) if entry.is_dir())
        return sorted(step for step in found if step is not None)

    def newest_good(self, on_damaged: OnDamaged) -> Checkpoint | None:
        """The newest checkpoint that verifies; every damaged one met on the way is reported."""
        return self._first_good(reversed(self.steps()), on_damaged)

    def best_good(self, on_damaged: OnDamaged) -> Checkpoint | None:
        """The checkpoint with the lowest validation loss that verifies, None when none has such a loss."""
        ranked = sorted((loss, step) for step, loss in self._readable().items() if loss is not None)
        return self._first_good((step for _, step in ranked), on_damaged)

    def retain(self, keep_last: int, *, committed: int | None = None) -> list[int]:
        """Delete all but the last `keep_last` checkpoints and the best; return the deleted steps.

        The newest one that verifies always stays. `committed` names a step sealed a moment ago, which need
        not be read again for that. What cannot be read is left alone: it does not count, and it may be of a
        newer rush.
        """
        assert keep_last >= 1, f"keep_last={keep_last} would keep nothing"
        losses = self._readable()
        keep = set(sorted(losses)[-keep_last:])
        known = [(loss, step) for step, loss in losses.items() if loss is not None]
        if known:
            keep.add(min(known)[1])
        if committed is not None:
            keep.add(committed)
        else:
            good = self.newest_good(lambda path, problem: None)
            if good is None:
                return []
            keep.add(good.step)
        doomed = sorted(losses.keys() - keep)
        for step in doomed:
            self._delete(step)
        return doomed

    def clean(self) -> list[Path]:
        """Remove what a crash left half done; return what was there. Only under the run's lock."""
        if not self.folder.is_dir():
            return []
        litter: list[Path] = []
        with writing(self.folder):
            for path in sorted(self.folder.iterdir()):
                step = _step_of(path.name.removeprefix(_REPLACED))
                if path.name.startswith(_REPLACED) and step is not None and not self.path(step).exists():
                    # The crash came between the two renames of a replacement: the old one is still the one.
                    os.rename(path, self.path(step))
                elif path.name.startswith((_WRITING, _REPLACED, _DELETED)):
                    litter.append(path)
                    _remove(path)
            fsync_folder(self.folder)
        return litter

    def _readable(self) -> dict[int, float | None]:
        """Validation losses of all checkpoints with a sound manifest and right sizes (no hashing)."""
        losses: dict[int, float | None] = {}
        for step in self.steps():
            with contextlib.suppress(CheckpointDamaged):
                manifest = read_manifest(self.path(step))
                check_sizes(self.path(step), manifest)
                losses[step] = _validation_loss(manifest)
        return losses

    def _first_good(self, steps: Iterable[int], on_damaged: OnDamaged) -> Checkpoint | None:
        for step in steps:
            try:
                return verify(self.path(step))
            except CheckpointDamaged as error:
                on_damaged(self.path(step), str(error))
        return None

    def _delete(self, step: int) -> None:
        hidden = self._hidden(_DELETED, step)
        with writing(self.path(step)):
            _remove(hidden)
            os.rename(self.path(step), hidden)
            fsync_folder(self.folder)
            _remove(hidden)

    def _hidden(self, prefix: str, step: int) -> Path:
        return self.folder / f"{prefix}{folder_name(step)}"


def _step_of(name: str) -> int | None:
    match = re.fullmatch(r"step-(\d{6,})", name, re.ASCII)
    step = int(match[1]) if match else None
    return step if step is not None and folder_name(step) == name else None


def _validation_loss(manifest: CheckpointManifest) -> float | None:
    metrics = manifest.meta.get("metrics")
    loss = metrics.get("val_loss") if isinstance(metrics, dict) else None
    return float(loss) if isinstance(loss, int | float) else None


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
