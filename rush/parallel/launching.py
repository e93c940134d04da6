"""Start the ranks of this machine with torchrun's engine, and start them again when one is lost.

What `torchrun --standalone --nproc-per-node N -m rush …` does, with differences a user notices: nothing but the
ranks' own messages is printed; a Ctrl-C reaches each rank once, which ends after its step, and a second one ends them now;
the exit code is that of the rank where the trouble began. And only what may go better another time is tried again: a
rank that was killed, crashed or hung, not a recipe that is wrong. When a rank fails, the engine ends the others; when this process is killed, they
leave (`joining`). So no rank is left behind.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from rush.errors import DataError, Diverged, MachineError, RankLost, RecipeError

INTERRUPTED = 130
FINAL = (
    RecipeError.exit_code,
    DataError.exit_code,
    MachineError.exit_code,
    Diverged.exit_code,
    INTERRUPTED,
)
"""Exit codes of ranks that would fail again, or were asked to stop."""
STOP_LIMIT_S = 120
"""How long ranks that were asked to stop may take for their step and its checkpoint."""


@dataclass(frozen=True)
class Ended:
    """How ranks ended together: the exit code for the launcher, and what happened first."""

    code: int
    what: str = ""

    @property
    def may_go_better(self) -> bool:
        return self.code != 0 and self.code not in FINAL


def launch(
    num_ranks: int,
    words: list[str],
    *,
    restarts: int = 0,
    saved: Callable[[], object] = lambda: None,
    fewer: Callable[[int], int | None] = lambda num_ranks: None,
) -> int:
    """`python -m rush WORDS` on each of the ranks; returns when all are gone, with the exit code for this process.

    Lost ranks are started again, all of them, with --resume: up to `restarts` times in a row without a new checkpoint,
    which `saved` tells by changing. After that `fewer` may name a smaller number of ranks to go on with.
    """
    if num_ranks < 1:
        raise RecipeError(f"--nproc is {num_ranks}; it takes at least one process.")
    if restarts < 0:
        raise RecipeError(f"--restarts is {restarts}; it takes a number of times, 0 for never.")
    in_a_row, before = 0, saved()
    while True:
        ended = _run_once(num_ranks, words)
        if not ended.may_go_better:
            return ended.code
        if "--resume" not in words:
            words = [*words, "--resume"]
        if (now := saved()) != before:
            in_a_row, before = 0, now
        if in_a_row < restarts:
            in_a_row += 1
            _say(
                f"{ended.what}; starting all ranks again from the last checkpoint ({in_a_row} of {restarts} restarts)."
            )
            continue
        left = fewer(num_ranks)
        if left is None:
            if restarts:
                _say(
                    f"{ended.what}; {restarts} restarts in a row brought no new checkpoint, so the run ends."
                )
            else:
                _say(f"{ended.what}; the run goes on from its last checkpoint with --resume.")
            return MachineError.exit_code if ended.code == RankLost.exit_code else ended.code
        _say(f"{ended.what}; going on from the last checkpoint with {left} ranks instead of {num_ranks}.")
        num_ranks, in_a_row = left, 0


def _say(message: str) -> None:
    print(f"rush: {message}", file=sys.stderr, flush=True)  # noqa: T201


def _run_once(num_ranks: int, words: list[str]) -> Ended:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_ranks)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(STOP_LIMIT_S))
    # torch's own warnings (sockets, what ddp was asked for on purpose) would come before the one message that helps; it asks for the
    # level when it is imported.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # All ranks are here; a host name that resolves to nowhere must not matter.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,  # which failures are worth another try is decided here, by their exit codes
        monitor_interval=0.1,
        local_addr="localhost",
        signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
    )
    try:
        with _interrupts():
            elastic_launch(config, sys.executable)("-m", "rush", *words)
    except ChildFailedError as error:
        return _explain(
            {rank: int(failure.exitcode) for rank, failure in error.failures.items()},
            error.get_first_failure()[0],
        )
    except SignalException:
        return Ended(INTERRUPTED)
    return Ended(0)


def _explain(codes: dict[int, int], first: int) -> Ended:
    """Where it began, of the exit codes of all ranks; those that only lost another one did not begin it."""
    for rank, code in codes.items():
        if code in FINAL:
            return Ended(code, f"rank {rank} ended with exit code {code}")
    ended_by_us = (RankLost.exit_code, -signal.SIGTERM)
    causes = [rank for rank, code in codes.items() if code not in ended_by_us]
    rank = first if first in causes or not causes else causes[0]
    code = codes[rank]
    if code < 0:
        # A rank that a signal ended has the signal's number, negative; shells say 128 more.
        return Ended(128 - code, f"rank {rank} was ended by {signal.Signals(-code).name}")
    if code == RankLost.exit_code:
        return Ended(code, "the ranks lost one another")
    return Ended(code, f"rank {rank} failed with exit code {code}")


@contextmanager
def _interrupts() -> Iterator[None]:
    """The first Ctrl-C asks the ranks to stop, and is waited for; the second ends them at once."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            import psutil  # type: ignore[import-untyped]

            for child in psutil.Process().children(recursive=True):
                child.kill()
            return
        asked = True
        raise SignalException("Ctrl-C", signal.Signals(number))

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
