"""Exit with the parent: a ladder killed by SIGKILL cannot end its processes, so Linux does it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_SET_DEATH_SIGNAL = 1


def die_with_parent(parent: int) -> None:
    """Be killed when the process `parent`, which started this one, ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
