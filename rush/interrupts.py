"""Defer a Ctrl-C until imports are done.

Python raises `KeyboardInterrupt` wherever the main thread is. In the first seconds of a command that is inside imports, where
it gets lost: destructors and C code drop it, and a library that probes for an optional import swallows it. Then the command
continues as if nothing had happened, or fails later on a partially imported module.
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from types import FrameType

AGAIN_S, LONGEST_S = 0.02, 20.0
"""Seconds between retries, and their maximum duration: a user's own file may run anything when it is imported."""
IMPORTING = "<frozen importlib"
"""How the file names of the import system's own frames begin."""


def defer_interrupts_in_imports() -> None:
    """Install the handler, unless this process ignores Ctrl-C, as background jobs of a shell do."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _Interrupts())


class _Interrupts:
    def __init__(self) -> None:
        self.since: float | None = None
        """When it was first deferred."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        since = now if self.since is None else self.since
        if _importing(frame) and now - since < LONGEST_S:
            self.since = since
            interrupt_again()
            return
        self.since = None
        raise KeyboardInterrupt


def _importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith(IMPORTING):
        frame = frame.f_back
    return frame is not None


def interrupt_again() -> None:
    """Interrupt the main thread a little later. A thread of `threading` would take locks that the main thread may hold."""
    _thread.start_new_thread(_interrupt_later, ())


def _interrupt_later() -> None:
    time.sleep(AGAIN_S)
    main = threading.main_thread().ident
    if main is not None:
        signal.pthread_kill(main, signal.SIGINT)  # a signal, because it also ends a wait
