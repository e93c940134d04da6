"""The folder of prepared data: its name, its lock, and a message when it cannot be written.

The lock is the kernel's (`flock`): it is released when its process ends, so a killed run leaves no stale lock. Atomic writes
are in `rush.files`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from rush.errors import MachineError
from rush.files import writing


def writable(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Turn a folder that cannot be written, or a full disk, into a MachineError."""
    advice = "Free the disk, fix the folder's permissions, or choose another folder for the cache."
    return writing(folder, "prepared data in ", advice)


def prepared_folder(source: str, cache: str | Path, key: str) -> Path:
    """The folder of a source with this fingerprint; the commit of a dataset is in the fingerprint."""
    label = re.sub("@[^:]*", "", source).removeprefix("hub:").strip("/").replace("/", "-").replace(":", "-")
    return Path(cache).absolute() / f"{label}-{key[:16]}"


@contextlib.contextmanager
def preparing(folder: Path, *, force: bool, wait: bool = True) -> Iterator[bool]:
    """Hold the folder's lock; yields whether it has to be prepared. `force` removes what is there."""
    with writable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(folder, wait=wait):
            if force:
                _clear(folder)
            yield not (folder / "manifest.json").is_file()


def _clear(folder: Path) -> None:
    """Remove prepared data. The manifest goes first: what is left is at worst unfinished."""
    (folder / "manifest.json").unlink(missing_ok=True)
    for name in ("units", "tokenizer", "pipeline", "train", "validation"):
        shutil.rmtree(folder / name, ignore_errors=True)


@contextlib.contextmanager
def folder_lock(folder: Path, *, wait: bool) -> Iterator[None]:
    """Hold `folder/lock`. If another process has it, `wait` for it, as the ranks of one job do, or refuse."""
    with (folder / "lock").open("a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if not wait:
                    file.seek(0)
                    owner = file.read().strip() or "unknown"
                    raise MachineError(
                        f"{folder} is being prepared by another process (pid {owner}). "
                        "Wait for it, or stop it first."
                    ) from error
                time.sleep(0.1)
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield
