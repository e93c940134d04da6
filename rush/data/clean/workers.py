"""A worker that dies is told, not waited for.

The engine's pool replaces a process that was killed (most often for lack of memory) but not the task it had, and then waits
for ever. So while a step runs on several processes here, a thread looks whether one of them has vanished.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

import psutil  # type: ignore[import-untyped]

from rush.errors import MachineError

LOOK_S = 0.2  # one that dies within this time of its birth is not missed: it was never seen
GRACE_S = 5.0  # at the end of a step its workers go as well, and the step ends soon after


class _Lost(BaseException):
    """Raised in the main thread, wherever it waits. Nobody else may take it for an error of theirs."""


def _leave(number: int, frame: FrameType | None) -> None:
    raise _Lost


@contextlib.contextmanager
def minding_workers(step: str) -> Iterator[None]:
    """Raise where one of this process's workers dies within the block. Only in the main thread: it is interrupted.

    By a signal of its own: the one of Ctrl-C is ignored by what a script started in the background.
    """
    main = threading.main_thread()
    if threading.current_thread() is not main:
        yield
        return
    stop = threading.Event()

    def look() -> None:
        known: set[int] = set()
        lost_at: float | None = None
        while not stop.wait(LOOK_S):
            alive = {process.pid for process in psutil.Process().children(recursive=True) if _runs(process)}
            if known - alive and lost_at is None:
                lost_at = time.monotonic()
            known |= alive
            if lost_at is not None and time.monotonic() - lost_at > GRACE_S and main.ident is not None:
                # Once to leave the wait; again where a worker died with the lock that ending the pool asks for.
                signal.pthread_kill(main.ident, signal.SIGUSR1)
                while not stop.wait(GRACE_S):
                    signal.pthread_kill(main.ident, signal.SIGUSR1)
                return

    thread = threading.Thread(target=look, daemon=True)
    before = signal.signal(signal.SIGUSR1, _leave)
    thread.start()
    try:
        yield
    except _Lost:
        stop.set()
        raise MachineError(
            f"A worker process died while {step}, most likely for lack of memory. Finished units are kept: run the "
            "same command again, with fewer --workers."
        ) from None
    finally:
        stop.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
