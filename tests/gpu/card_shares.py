"""Shares of one card's memory, for tests that run at the same time in several processes.

A life of a ready recipe and the commands of a page take gigabytes. Thirteen of them at once do not fit on a card, and a full
card fails tests that have nothing to do with it. So each takes a share and waits until one is free, and the card has room.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import torch

SHARES = 7
ROOM_BYTES, LONGEST_WAIT_S = 40 << 30, 60.0
"""What a share may take at most, and how long it waits until that is free: a smaller card never has it."""


@contextmanager
def card_share() -> Iterator[None]:
    """Hold one of the card's shares. It is free again when the process ends, however it ends."""
    folder = Path(tempfile.gettempdir()) / f"rush-card-shares-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    for number in cycle(range(SHARES)):
        with open(folder / f"share-{number}", "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)
                continue
            _wait_for_room()
            yield
            return


def _wait_for_room() -> None:
    until = time.monotonic() + LONGEST_WAIT_S
    while torch.cuda.mem_get_info()[0] < ROOM_BYTES and time.monotonic() < until:
        time.sleep(0.5)
