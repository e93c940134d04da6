"""The stopwatch for pieces of device work: ceilings, explanations and the kernel bench take their times here.

Three things distort such timings. The cache: what a call left in it makes the next one faster than it will be in a model, so
with `cold` a large buffer is overwritten between calls. The host: a kernel of 40 µs is over before Python has launched the
next, and one would time Python. So times on CUDA are those of events on the device, and the host runs ahead of it. Clock
rates change during a measurement, so contenders take turns, one call of each per round, under the same conditions.

`time_calls` times one call; `take_turns` compares several. Torch is imported on first use.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

WINDOW_S = 2e-4
"""A sample is as many calls as take this long."""
MOST_CALLS = 200
"""In a sample on CUDA: more would fill the queue of launches."""
FLUSH_BYTES = 256 * 2**20
"""Several times the largest cache of today's devices."""
MOST_FLUSHES, MOST_TRIES = 96, 5
Work = Callable[[], object]
Made = TypeVar("Made")


def time_calls(
    work: Work,
    device: str,
    *,
    budget_s: float,
    least: int = 5,
    most: int = 30,
    window_s: float = WINDOW_S,
    cold: bool = False,
) -> list[float]:
    """Seconds of a call, in `least` to `most` samples, within the budget where possible. `cold` is for CUDA."""
    began = time.perf_counter()
    deadline = began + budget_s
    cuda = device == "cuda"
    once = _device_samples(work, 1, 3)[-1] if cuda else _host_sample(work, device, 1)
    # Warm up for a tenth of the budget: a GPU starts at idle clocks.
    while time.perf_counter() - began < budget_s / 10:
        once = _device_samples(work, 1, 1)[0] if cuda else _host_sample(work, device, 1)
    calls = max(1, math.ceil(window_s / max(once, 1e-9)))
    if cuda:
        calls = 1 if cold else min(calls, MOST_CALLS)
        affordable = int((deadline - time.perf_counter()) / max(once * calls, 1e-6))
        return _device_samples(work, calls, max(least, min(most, affordable)), cold=cold)
    samples: list[float] = []
    while len(samples) < least or (len(samples) < most and time.perf_counter() + once * calls < deadline):
        samples.append(_host_sample(work, device, calls))
    return samples


def _host_sample(work: Work, device: str, calls: int) -> float:
    """By the clock: on a CPU a call is over when it returns."""
    _wait(device)
    began = time.perf_counter()
    for _ in range(calls):
        work()
    _wait(device)
    return (time.perf_counter() - began) / calls


def _device_samples(work: Work, calls: int, number: int, *, cold: bool = False) -> list[float]:
    """By events on the device, enqueued without waiting in between, so that it never idles for Python."""
    flush_buffer, pairs = _flush_buffer() if cold else None, []
    for _ in range(number):
        if flush_buffer is not None:
            flush_buffer.zero_()
        start, end = _events()
        start.record()
        for _ in range(calls):
            work()
        end.record()
        pairs.append((start, end))
    _wait("cuda")
    # An event has a resolution of half a microsecond; nothing measured here is shorter.
    return [max(start.elapsed_time(end) / 1000 / calls, 1e-9) for start, end in pairs]


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    return start, end


def _flush_buffer() -> torch.Tensor:
    """A buffer larger than the last-level cache: writing it evicts everything else."""
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    cache = int(getattr(properties, "L2_cache_size", 0) or 0)
    return torch.empty(max(4 * cache, FLUSH_BYTES), dtype=torch.int8, device="cuda")


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()
    elif device == "mps":
        torch.mps.synchronize()


@dataclass(frozen=True)
class TimedCase:
    """What is timed: `timed` gets what `setup`, outside of the timing, returned."""

    setup: Callable[[], Any]
    timed: Callable[[Any], object]


@dataclass(frozen=True)
class Effort:
    """How many samples to take."""

    least: int = 10
    most: int = 40
    budget_s: float = 0.25
    """For all contenders together; `least` samples are taken in any case."""


QUICK = Effort(least=7, most=15, budget_s=0.1)


class CaseFailed(Exception):
    """The case `name` raised `problem`."""

    def __init__(self, name: str, problem: Exception) -> None:
        super().__init__(name)
        self.name, self.problem = name, problem


def take_turns(
    cases: Mapping[str, TimedCase], device: torch.device, effort: Effort
) -> dict[str, list[float]]:
    """Milliseconds of every call: in each round one cold call of every case. May raise `CaseFailed`.

    A contender that makes the host wait for the device pays for that here as it would in a model.
    """
    turns = _DeviceTurns() if device.type == "cuda" else _HostTurns()
    costs = {name: _guarded(turns.warm_up, name, case) for name, case in cases.items()}
    affordable = int(effort.budget_s / max(1e-6, sum(costs.values())))
    rounds = min(effort.most, max(effort.least, affordable))
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        taken = {name: _guarded(turns.take, name, case) for name, case in cases.items()}
        for name, read in taken.items():
            found[name].append(read())
    return found


def _guarded(work: Callable[[str, TimedCase], Made], name: str, case: TimedCase) -> Made:
    try:
        return work(name, case)
    except Exception as problem:
        raise CaseFailed(name, problem) from problem


class _HostTurns:
    def warm_up(self, name: str, case: TimedCase) -> float:
        """Seconds that one sample costs."""
        began = time.perf_counter()
        case.timed(case.setup())
        return time.perf_counter() - began

    def take(self, name: str, case: TimedCase) -> Callable[[], float]:
        state = case.setup()
        began = time.perf_counter()
        case.timed(state)
        spent = time.perf_counter() - began
        return lambda: 1000 * max(spent, 1e-9)


class _DeviceTurns:
    """By events, which the host reads when the round is over. Overwriting the buffer also gives the host the time to launch
    the call; a call that the device began before all of it was launched is repeated with more of that."""

    def __init__(self) -> None:
        self.buffer = _flush_buffer()
        self.flushes: dict[str, int] = {}
        self.flush_s = _device_samples(self.buffer.zero_, 4, 2)[-1]

    def warm_up(self, name: str, case: TimedCase) -> float:
        """Seconds that one sample costs; also how far the host must run ahead."""
        host_s = whole_s = 0.0
        for _ in range(3):
            state = case.setup()
            _wait("cuda")
            began = time.perf_counter()
            case.timed(state)
            host_s = time.perf_counter() - began
            _wait("cuda")
            whole_s = time.perf_counter() - began
        self.flushes[name] = min(MOST_FLUSHES, 1 + math.ceil(1.5 * host_s / self.flush_s))
        return whole_s + self.flushes[name] * self.flush_s

    def take(self, name: str, case: TimedCase) -> Callable[[], float]:
        for _ in range(MOST_TRIES):
            start, end = _events()
            state = case.setup()
            for _ in range(self.flushes[name]):
                self.buffer.zero_()
            start.record()
            case.timed(state)
            end.record()
            # Contenders that wait for the device never get ahead of it, nor does more of this than fits into a queue.
            if not start.query() or self.flushes[name] == MOST_FLUSHES:  # type: ignore[no-untyped-call]
                break
            self.flushes[name] = min(MOST_FLUSHES, 2 * self.flushes[name])

        def read() -> float:
            end.synchronize()
            return float(start.elapsed_time(end))

        return read
