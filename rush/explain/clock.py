"""Timing for the topics: warm up, then samples until the budget is used up, all of them kept.

A CPU sample is the clock around as many calls as fill a fifth of a millisecond. On CUDA it is a pair of events
on the device, so that the time of a launch from Python is not taken for the kernel's. With `cold` the
last-level cache is filled with something else before every call: a tensor that a step would find in memory
must not be found in the cache only because it was timed twice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rush.lab.statistics import median_interval

WINDOW_S = 2e-4
Work = Callable[[], object]


def stat(samples: Sequence[float]) -> dict[str, Any]:
    """The median of some timings with its 95 % interval, and the timings."""
    kept = [float(f"{value:.5g}") for value in samples]
    found = median_interval([kept])
    return {"median": found.median, "low": found.low, "high": found.high, "n": found.n, "samples": kept}


def byte_rate(row: Mapping[str, Any]) -> float:
    """Bytes per second of a row that moved so many bytes in its timing."""
    return float(row["moved"] / row["seconds"]["median"])


def timed(
    work: Work, device: str, *, budget_s: float, least: int = 5, most: int = 30, cold: bool = False
) -> dict[str, Any]:
    """Seconds of one call, from `least` samples or more, within the budget where possible."""
    if device == "cuda":
        return stat(_on_device(work, budget_s, least, most, cold))
    return stat(_on_host(work, budget_s, least, most))


def _on_host(work: Work, budget_s: float, least: int, most: int) -> list[float]:
    once = _host_once(work, 1)
    began = time.perf_counter()
    # A few more warm-up calls, a tenth of the budget at most; the last one gives the time of a call.
    while time.perf_counter() - began < budget_s / 10:
        once = _host_once(work, 1)
    inner = max(1, math.ceil(WINDOW_S / max(once, 1e-9)))
    deadline = time.perf_counter() + budget_s
    samples: list[float] = []
    while len(samples) < least or (len(samples) < most and time.perf_counter() + once * inner < deadline):
        samples.append(_host_once(work, inner))
    return samples


def _host_once(work: Work, inner: int) -> float:
    began = time.perf_counter()
    for _ in range(inner):
        work()
    return (time.perf_counter() - began) / inner


def _on_device(work: Work, budget_s: float, least: int, most: int, cold: bool) -> list[float]:
    import torch

    for _ in range(3):
        work()
    torch.cuda.synchronize()
    flush_buffer = _flush_buffer() if cold else None
    once = max(_device_samples(work, 1, 3, None))
    inner = 1 if cold else max(1, min(200, math.ceil(WINDOW_S / max(once, 1e-9))))
    number = max(least, min(most, int(budget_s / max(once * inner, 1e-6))))
    return _device_samples(work, inner, number, flush_buffer)


def _device_samples(work: Work, inner: int, number: int, flush_buffer: Any) -> list[float]:
    """Samples enqueued without waiting in between, so that the device never idles for Python."""
    import torch

    pairs = []
    for _ in range(number):
        if flush_buffer is not None:
            flush_buffer.zero_()
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(inner):
            work()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    # An event has a resolution of half a microsecond; nothing measured here is shorter.
    return [max(start.elapsed_time(end) / 1000 / inner, 1e-9) for start, end in pairs]


def _flush_buffer() -> Any:
    """A buffer larger than the last-level cache; writing it drives out everything else."""
    import torch

    cache = int(
        getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "L2_cache_size", 0) or 0
    )
    return torch.empty(max(4 * cache, 2**28), dtype=torch.int8, device="cuda")
