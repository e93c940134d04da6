"""Start the ranks of this machine: torchrun's engine, in this process.

What `torchrun --standalone --nproc-per-node N -m rush …` does, with three differences a user notices: the exit code is
that of the rank that failed first, nothing but the ranks' own messages is printed, and a Ctrl-C reaches each rank
once, which ends after its step. When a rank fails, the engine ends the others; when this process is killed, they
notice and leave (`joining`). So no rank is left behind.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid

from rush.errors import RecipeError

INTERRUPTED = 130
STOP_LIMIT_S = 120
"""How long ranks that were asked to stop may take for their step and its checkpoint."""


def launch(num_ranks: int, words: list[str]) -> int:
    """`python -m rush WORDS` on each of the ranks; returns when all are gone, with the exit code for this process."""
    if num_ranks < 1:
        raise RecipeError(f"--nproc is {num_ranks}; it takes at least one process.")
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // num_ranks)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(STOP_LIMIT_S))
    # All ranks are here; a host name that resolves to nowhere must not matter.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="localhost",
    )
    try:
        elastic_launch(config, sys.executable)("-m", "rush", *words)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        # A rank that a signal ended has the signal's number, negative; shells say 128 more.
        return int(failure.exitcode) if failure.exitcode > 0 else 128 - int(failure.exitcode)
    except SignalException:
        return INTERRUPTED
    return 0
