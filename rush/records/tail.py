"""The lines of a growing file: those added since the last read, complete lines only, every byte read once."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PIECE_BYTES, MOST_SKIPPED = 1 << 20, 1 << 28
LONGEST_LINE = 1 << 20
"""Longer lines are skipped: an untrusted file must not fill the memory. After 256 MiB of nothing else the file is not read
further."""


def open_file(path: Path, *, follow: bool = True) -> int | None:
    """A descriptor to read a plain file; None for anything else, and without `follow` for a symbolic link."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    return None


@dataclass
class Tail:
    """The read position in a file."""

    path: Path
    follow: bool = True
    bytes_read: int = 0
    """Total bytes read, for tests of the work done."""
    num_too_long: int = 0

    def __post_init__(self) -> None:
        self._identity: tuple[int, int] | None = None
        self._restart()

    def _restart(self) -> None:
        self._offset, self._rest, self._skipping = 0, b"", False

    def read(self) -> tuple[bool, Iterator[bytes]]:
        """Whether the file was replaced (reading starts over), and its new lines, without line ends."""
        descriptor = open_file(self.path, follow=self.follow)
        if descriptor is None:
            return False, iter(())
        found = os.fstat(descriptor)
        identity = found.st_dev, found.st_ino
        anew = self._identity not in (None, identity) or found.st_size < self._offset
        if anew:
            self._restart()
        self._identity = identity
        return anew, self._lines(descriptor, found.st_size)

    def _lines(self, descriptor: int, size: int) -> Iterator[bytes]:
        with open(descriptor, "rb", buffering=0) as file:
            file.seek(self._offset)
            skipped = 0
            while self._offset < size and (piece := file.read(min(PIECE_BYTES, size - self._offset))):
                self._offset += len(piece)
                self.bytes_read += len(piece)
                *lines, self._rest = (self._rest + piece).split(b"\n")
                for line in lines:
                    if self._skipping:
                        self._skipping = False
                        self.num_too_long += 1
                    else:
                        yield line
                if len(self._rest) > LONGEST_LINE:
                    self._rest, self._skipping = b"", True
                    skipped += LONGEST_LINE
                    if skipped > MOST_SKIPPED:
                        self._offset = size
