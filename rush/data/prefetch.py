"""Shared by all loaders: their rank, prefetching threads, and closing.

Workers are threads: building a batch copies mapped memory, which releases the GIL. Processes would copy batches once more.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier
from typing import Generic, Self, TypeVar

import torch

from rush.data.batch import Batch
from rush.errors import DataError, MachineError, RecipeError

Place = TypeVar("Place")


class PrefetchingLoader(ABC, Generic[Place]):
    """A loader with prefetching threads. A subclass defines the positions of its batches and builds one."""

    def __init__(self, rank: int, world: int, workers: int, pin: bool) -> None:
        if not 0 <= rank < world:
            raise RecipeError(f"Rank {rank} of {world} does not exist; ranks count from 0.")
        if workers < 0:
            raise RecipeError(f"The number of loader workers is {workers}; it must be at least 0.")
        if pin and not torch.cuda.is_available():
            raise MachineError(
                "Pinned memory was asked for, but there is no CUDA device. Switch pinning off."
            )
        self.rank, self.world, self.pin = rank, world, pin
        self._pool = _started_pool(workers) if workers else None
        self._ahead = 2 * workers
        self._waiting: deque[tuple[Place, Future[Batch]]] = deque()

    @abstractmethod
    def _job(self, place: Place) -> Callable[[], Batch]:
        """A function that builds the batch at a position; it may run in a thread."""

    @abstractmethod
    def _following(self, place: Place) -> Place:
        """The position of this rank's next batch."""

    def batches(self, places: Iterable[Place]) -> Iterator[Batch]:
        """The batches at these positions, built on demand or prefetched."""
        for place in places:
            if self._pool is None:
                yield self._finished(self._job(place))
                continue
            while self._waiting and self._waiting[0][0] != place:  # the last step was not read to its end
                self._waiting.popleft()[1].cancel()
            last = self._waiting[-1][0] if self._waiting else None
            while len(self._waiting) <= self._ahead:
                last = place if last is None else self._following(last)
                self._waiting.append((last, self._pool.submit(self._finished, self._job(last))))
            yield self._waiting.popleft()[1].result()

    def close(self) -> None:
        """Stop the workers. Also done at the end of a `with` block."""
        self._drop_waiting()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _finished(self, job: Callable[[], Batch]) -> Batch:
        batch = job()
        return batch.pin() if self.pin else batch

    def _drop_waiting(self) -> None:
        for _, future in self._waiting:
            future.cancel()
        self._waiting.clear()


def ceil_nearly(number: float) -> int:
    """Round up, or down if the value exceeds a whole number only by rounding error."""
    return math.ceil(number - 1e-9 * max(1.0, number))


def _started_pool(workers: int) -> ThreadPoolExecutor:
    """Threads that all run. A pool starts one only when none is idle: with quick jobs fewer would run than were asked for."""
    pool, gate = ThreadPoolExecutor(workers, "rush-loader"), Barrier(workers)
    for started in [pool.submit(gate.wait) for _ in range(workers)]:
        started.result()
    return pool


def check_state(state: Mapping[str, int]) -> None:
    """Validate a loader state: three integers."""
    if set(state) != {"seed", "epoch", "position"} or any(type(v) is not int for v in state.values()):
        raise DataError(f"Not a loader state: {dict(state)}. Expected whole numbers seed, epoch, position.")
