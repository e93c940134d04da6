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

import psutil  # type: ignore[import-untyped]

from rush.errors import MachineError

LOOK_S = 0.2  # one that dies within this time of its birth is not missed: it was never seen
GRACE_S = 5.0  # at the end of a step its workers go as well, and the step ends soon after


@contextlib.contextmanager
def minding_workers(step: str) -> Iterator[None]:
    """Raise where one of this process's workers dies within the block. Only in the main thread: it is interrupted."""
    main = threading.main_thread()
    if threading.current_thread() is not main:
        yield
        return
    stop, died = threading.Event(), threading.Event()

    def look() -> None:
        known: set[int] = set()
        lost_at: float | None = None
        while not stop.wait(LOOK_S):
            alive = {process.pid for process in psutil.Process().children(recursive=True) if _runs(process)}
            if known - alive and lost_at is None:
                lost_at = time.monotonic()
            known |= alive
            if lost_at is not None and time.monotonic() - lost_at > GRACE_S and main.ident is not None:
                died.set()
                signal.pthread_kill(main.ident, signal.SIGINT)
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    except KeyboardInterrupt:
        if not died.is_set():
            raise
        raise MachineError(
            f"A worker process died while {step}, most likely for lack of memory. Finished units are kept: run the "
            "same command again, with fewer --workers."
        ) from None
    finally:
        stop.set()
        thread.join()


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
