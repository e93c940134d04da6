"""One run per folder: a lock that the kernel releases with its process.

The mere existence of a file is a poor lock: after a SIGKILL it stays, and someone must decide whether to delete it. `flock`
belongs to the open file instead, so the kernel releases it when the process ends in any way. The text inside (process, host,
time) only serves the message to a second process; a release empties the file, because folders are shared. A forked child would
inherit the open file and hold the lock beyond its parent's life, so children close it after the fork. The file itself is never
deleted: deleting a lock file that another process is just opening would let two in.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path

from rush.errors import MachineError
from rush.files import parse_json, writing

LOCK_NAME = ".lock"


class FolderLock:
    """An exclusive hold on a folder, from construction to `release` (or the end of the process)."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK_NAME
        self._descriptor: int | None = None
        with writing(self.path):
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 4096, 0)
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise MachineError(
                    f"Cannot lock {self.path}: {error.strerror}. Choose a local folder."
                ) from error
            raise MachineError(
                f"{folder} is in use by {_describe(holder)}. "
                "Wait for it to end, stop it, or choose another folder."
            ) from None
        self._descriptor = descriptor
        try:
            with writing(self.path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, _holder(), 0)
        except MachineError:
            self.release()
            raise
        # A weak reference, because such a hook can never be taken back.
        itself = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _drop(itself))

    def release(self) -> None:
        """Release the lock. Releasing twice is harmless."""
        if self._descriptor is not None:
            with contextlib.suppress(OSError):  # the disk may be read-only by now
                os.ftruncate(self._descriptor, 0)
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _drop(reference: weakref.ReferenceType[FolderLock]) -> None:
    lock = reference()
    if lock is not None:
        # Closing the child's copy does not unlock: the parent's own copy still holds the lock.
        lock._close()


def _holder() -> bytes:
    started = time.strftime("%Y-%m-%d %H:%M:%S %z")
    return json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "started": started}).encode()


def _describe(content: bytes) -> str:
    """The lock's holder, as far as the file shows (the holder may be writing it right now)."""
    try:
        holder = parse_json(content)
        return f"process {holder['pid']} on {holder['host']} since {holder['started']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
