"""The folder of prepared data: a message when it cannot be written, and a lock.

The lock is the kernel's (`flock`): it disappears with its process, so a killed run never leaves a
stale lock behind. How files are written whole or not at all is in `rush.files`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from rush.errors import MachineError
from rush.files import writing


def writable(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Turn a folder that cannot be written, or a full disk, into a MachineError."""
    advice = "Free the disk, fix the folder's permissions, or choose another folder for the cache."
    return writing(folder, "prepared data in ", advice)


@contextlib.contextmanager
def folder_lock(folder: Path, *, wait: bool) -> Iterator[None]:
    """Hold `folder/lock`. With `wait`, stand in line (ranks of one job do this); without, refuse."""
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
