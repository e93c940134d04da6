"""Shares of one card's memory, for tests that run at the same time in several processes.

A life of a ready recipe takes gigabytes. Thirteen of them at once do not fit on a card, and a full card fails tests that have
nothing to do with it. So a large life takes a share, or several, and waits until they are free.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

SHARES = 6


@contextmanager
def card_shares(count: int = 1) -> Iterator[None]:
    """Hold `count` of the card's shares. They are free again when the process ends, however it ends."""
    with ExitStack() as held:
        if count > 1:  # one process at a time collects several, so that two never wait for each other
            held.enter_context(_lock("gate", wait=True))
        taken: set[int] = set()
        while len(taken) < count:
            for number in set(range(SHARES)) - taken:
                if len(taken) < count:
                    try:
                        held.enter_context(_lock(f"share-{number}", wait=False))
                    except BlockingIOError:
                        continue
                    taken.add(number)
            time.sleep(0.0 if len(taken) == count else 0.5)
        yield


@contextmanager
def _lock(name: str, *, wait: bool) -> Iterator[None]:
    folder = Path(tempfile.gettempdir()) / f"rush-card-shares-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    with open(folder / name, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
