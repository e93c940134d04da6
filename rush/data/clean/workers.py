"""Detect dead worker processes.

datatrove's pool replaces a killed process (most often out of memory) but not its task, and waits forever. So while a step runs
on several local processes, a thread checks that they are alive.
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

POLL_S = 0.2  # a process that dies within this time of its start is not noticed
GRACE_S = 5.0  # at the end of a step its workers exit too, and the step ends soon after


class _Lost(BaseException):
    """Raised in the main thread, wherever it waits. A BaseException, so that no other handler catches it."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _Lost


@contextlib.contextmanager
def detecting_dead_workers(step: str) -> Iterator[None]:
    """Raise MachineError when a worker of this process dies within the block. Only in the main thread, which is interrupted.

    By SIGUSR1: background processes of a script ignore SIGINT.
    """
    main = threading.main_thread()
    if threading.current_thread() is not main:
        yield
        return
    stop = threading.Event()

    def poll() -> None:
        known: set[int] = set()
        lost_at: float | None = None
        while not stop.wait(POLL_S):
            alive = {process.pid for process in psutil.Process().children(recursive=True) if _runs(process)}
            if known - alive and lost_at is None:
                lost_at = time.monotonic()
            known |= alive
            if lost_at is not None and time.monotonic() - lost_at > GRACE_S and main.ident is not None:
                # Once to leave the wait; again where a dead worker held the lock that closing the pool needs.
                signal.pthread_kill(main.ident, signal.SIGUSR1)
                while not stop.wait(GRACE_S):
                    signal.pthread_kill(main.ident, signal.SIGUSR1)
                return

    thread = threading.Thread(target=poll, daemon=True)
    before = signal.signal(signal.SIGUSR1, _interrupt)
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
