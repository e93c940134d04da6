"""Worker processes for data preparation: spawned, and ended with their parent."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import TypeVar

from rush.errors import MachineError, RecipeError

Job = TypeVar("Job")
Result = TypeVar("Result")


def check_workers(workers: int | None) -> None:
    if workers is not None and workers < 1:
        raise RecipeError(f"The number of workers is {workers}; it must be at least 1.")


def run_each(run: Callable[[Job], Result], jobs: Sequence[Job], workers: int) -> Iterator[Result]:
    """The result of each job as it ends, from this process with one worker, else from a pool."""
    workers = min(workers, len(jobs))
    if workers <= 1:
        yield from map(run, jobs)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker) as pool:
        try:
            for future in as_completed([pool.submit(run, job) for job in jobs]):
                yield future.result()
        except BrokenProcessPool as error:
            raise MachineError(
                "A worker process died while tokenizing, most likely for lack of memory. "
                "Finished parts are kept: run the same command again, with fewer workers."
            ) from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core already
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_leave_with, args=(parent.sentinel,), daemon=True).start()


def _leave_with(sentinel: int) -> None:
    """Exit with the parent: a killed parent cannot stop its pool, which would wait for work forever."""
    wait([sentinel])
    os._exit(1)
