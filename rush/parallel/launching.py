"""Launch the ranks of this machine with torch's elastic launcher, and restart them when one is lost.

Like `torchrun --standalone --nproc-per-node N -m rush …`, but only the ranks' own messages are printed; a first Ctrl-C makes
each rank stop after its step, a second one kills them; and the exit code is that of the rank that failed first. Only failures
that may not repeat are retried: a rank that was killed, crashed or hung, not a wrong recipe. When a rank fails, the launcher
ends the others; when the launcher is killed, they exit (`process_group`).
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
from typing import TYPE_CHECKING, Any

from rush.errors import DataError, Diverged, MachineError, RankLost, RecipeError

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

INTERRUPTED = 130
FINAL = (
    RecipeError.exit_code,
    DataError.exit_code,
    MachineError.exit_code,
    Diverged.exit_code,
    INTERRUPTED,
)
"""Exit codes that are not retried: the rank would fail again, or was asked to stop."""
STOP_LIMIT_S = 120
"""How long ranks may take to stop: a step and its checkpoint."""


@dataclass(frozen=True)
class LaunchResult:
    """The launcher's exit code, and the first failure."""

    code: int
    failure: str = ""

    @property
    def retryable(self) -> bool:
        return self.code != 0 and self.code not in FINAL


def launch(
    num_ranks: int,
    arguments: list[str],
    *,
    restarts: int = 0,
    last_checkpoint: Callable[[], object] = lambda: None,
    fewer: Callable[[int], int | None] = lambda num_ranks: None,
    resumable: bool = True,
) -> int:
    """Run `python -m rush ARGUMENTS` on each rank; return the exit code once all have ended.

    After a lost rank all are restarted with --resume, up to `restarts` times without a change of `last_checkpoint`. After that
    `fewer` may give a smaller number of ranks to continue with. What is not `resumable` just ends.
    """
    if num_ranks < 1:
        raise RecipeError(f"--nproc is {num_ranks}; at least one process is needed.")
    if restarts < 0:
        raise RecipeError(f"--restarts is {restarts}; allowed is 0 (never) or more.")
    in_a_row, before = 0, last_checkpoint()
    while True:
        result = _run_once(num_ranks, arguments)
        if not result.retryable:
            return result.code
        if not resumable:
            _log(f"{result.failure}.")
            return MachineError.exit_code if result.code == RankLost.exit_code else result.code
        if "--resume" not in arguments:
            arguments = [*arguments, "--resume"]
        if (now := last_checkpoint()) != before:
            in_a_row, before = 0, now
        if in_a_row < restarts:
            in_a_row += 1
            _log(
                f"{result.failure}; restarting all ranks from the last checkpoint ({in_a_row} of {restarts} restarts)."
            )
            continue
        left = fewer(num_ranks)
        if left is None:
            if restarts:
                _log(
                    f"{result.failure}; {restarts} restarts in a row brought no new checkpoint, so the run ends."
                )
            else:
                _log(f"{result.failure}; continue from the last checkpoint with --resume.")
            return MachineError.exit_code if result.code == RankLost.exit_code else result.code
        _log(
            f"{result.failure}; continuing from the last checkpoint with {left} ranks instead of {num_ranks}."
        )
        num_ranks, in_a_row = left, 0


def _log(message: str) -> None:
    print(f"rush: {message}", file=sys.stderr, flush=True)  # noqa: T201


def local_config(num_ranks: int, **options: Any) -> LaunchConfig:
    """The launcher's settings for ranks that are all on this machine."""
    from torch.distributed.launcher.api import LaunchConfig

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # The machine's host name need not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,  # restarts are decided here, by exit codes
        local_addr="localhost",
        **options,
    )


def threads_per_rank(num_ranks: int) -> int:
    """This machine's cores, shared by its ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_ranks)


def _run_once(num_ranks: int, arguments: list[str]) -> LaunchResult:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(threads_per_rank(num_ranks)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(STOP_LIMIT_S))
    # torch's own warnings would come before the one message that helps; it reads the level on import.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    config = local_config(num_ranks, monitor_interval=0.1, signals_to_handle="SIGTERM,SIGHUP,SIGQUIT")
    try:
        with _interrupts():
            elastic_launch(config, sys.executable)("-m", "rush", *arguments)
    except ChildFailedError as error:
        return _first_failure(
            {rank: int(failure.exitcode) for rank, failure in error.failures.items()},
            error.get_first_failure()[0],
        )
    except SignalException:
        return LaunchResult(INTERRUPTED)
    return LaunchResult(0)


def _first_failure(codes: dict[int, int], first: int) -> LaunchResult:
    """The failure that caused the others, from the exit codes of all ranks; ranks that only lost another are no cause."""
    for rank, code in codes.items():
        if code in FINAL:
            return LaunchResult(code, f"rank {rank} ended with exit code {code}")
    ended_by_us = (RankLost.exit_code, -signal.SIGTERM)
    causes = [rank for rank, code in codes.items() if code not in ended_by_us]
    rank = first if first in causes or not causes else causes[0]
    code = codes[rank]
    if code < 0:
        # torch gives a signal's number negative, shells add 128.
        return LaunchResult(128 - code, f"rank {rank} was ended by {signal.Signals(-code).name}")
    if code == RankLost.exit_code:
        return LaunchResult(code, "the ranks lost one another")
    return LaunchResult(code, f"rank {rank} failed with exit code {code}")


@contextmanager
def _interrupts() -> Iterator[None]:
    """The first Ctrl-C asks the ranks to stop, and waits; the second kills them."""
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
