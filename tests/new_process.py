"""Running a part of a test in a new process: for what depends on memory that other tests left reserved."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_new_process(work: Callable[[], T]) -> T:
    """The result of a function of a module's top level, or the exception it raised."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work).result()
