"""Worker processes for preparation: started fresh (spawn), gone when their parent is gone."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait
from typing import TypeVar

from rush.data.preparation_unit import UnitJob, run_unit
from rush.data.shards import Shard
from rush.errors import MachineError

Job = TypeVar("Job")
Result = TypeVar("Result")


def run_jobs(jobs: list[UnitJob], workers: int) -> Iterator[tuple[Shard, ...]]:
    """The shards of each job as it ends."""
    return run_each(run_unit, jobs, workers)


def run_each(run: Callable[[Job], Result], jobs: Sequence[Job], workers: int) -> Iterator[Result]:
    """What each job gives, as it ends: in this process where one worker is enough, in a pool otherwise."""
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
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process per core already; threads would only collide
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_leave_with, args=(parent.sentinel,), daemon=True).start()


def _leave_with(sentinel: int) -> None:
    """A killed parent cannot stop its pool, whose members would wait for work for ever."""
    wait([sentinel])
    os._exit(1)
