"""Writing files that are either whole or absent, and a lock on a folder.

A process can die between any two instructions, and a machine can lose power. A file is therefore
written under a temporary name in the same folder, flushed to the disk, and renamed: a rename within a
folder happens entirely or not at all. The folder is flushed too, or the new name itself could be lost.
The lock is the kernel's (`flock`): it disappears with its process, so a killed run never leaves a
stale lock behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from rush.errors import MachineError

TEMPORARY = ".tmp-"


def temporary_name(path: Path) -> Path:
    """The name a file has while it is being written. It carries the process, so two never collide."""
    return path.with_name(f"{path.name}{TEMPORARY}{os.getpid()}")


def flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish(temporary: Path, path: Path) -> None:
    """Give a finished, flushed temporary file its real name."""
    os.replace(temporary, path)
    flush_folder(path.parent)


def write_whole(path: Path, content: bytes) -> None:
    temporary = temporary_name(path)
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    publish(temporary, path)


def remove_temporaries(folder: Path) -> None:
    """Sweep up what a killed process left. Call it only while holding the folder's lock."""
    for leftover in folder.rglob(f"*{TEMPORARY}*"):
        leftover.unlink(missing_ok=True)


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Turn a folder that cannot be written, or a full disk, into a message for a person."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is None:
            raise
        raise MachineError(
            f"Cannot write prepared data in {folder}: {error.strerror or error}. "
            "Free the disk, mend the folder's permissions, or choose another folder for the cache."
        ) from error


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
