"""Timing small pieces of device work against each other, fairly.

Three things distort such timings. The cache: what a call left in it makes the next one faster than it will be
in a model, so a large buffer is overwritten between calls. The host: a kernel of 40 µs is over before Python
has launched the next, and one would time Python; so the overwriting is repeated until the host is ahead, and
the events on the device see device work only. A call that the device began before all of it was launched is
repeated with more of it. Clock rates change during a measurement, so contenders take turns, one call each per
round, under the same conditions.

A contender that makes the host wait for the device pays for that here as it would in a model.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

FLUSH_BYTES = 256 * 2**20
"""Several times the largest cache of today's devices."""
MOST_FLUSHES, MOST_TRIES = 96, 5
Made = TypeVar("Made")


@dataclass(frozen=True)
class TimedCase:
    """What is timed: `timed` gets what `setup`, outside the clock, returned."""

    setup: Callable[[], Any]
    timed: Callable[[Any], object]


@dataclass(frozen=True)
class Effort:
    """How many samples to take."""

    least: int = 10
    most: int = 40
    budget_s: float = 0.25
    """For all contenders together; `least` samples are taken in any case."""


class CaseFailed(Exception):
    """One of the cases raised; `name` says which."""

    def __init__(self, name: str, problem: Exception) -> None:
        super().__init__(name)
        self.name, self.problem = name, problem


QUICK = Effort(least=7, most=15, budget_s=0.1)


def take_turns(
    cases: Mapping[str, TimedCase], device: torch.device, effort: Effort
) -> dict[str, list[float]]:
    """Milliseconds of every call: so many rounds, in each round one call of every case. May raise `CaseFailed`."""
    sample = _Device(device) if device.type == "cuda" else _Host()
    costs = {name: _guarded(sample.warm_up, name, case) for name, case in cases.items()}
    affordable = int(effort.budget_s / max(1e-6, sum(costs.values())))
    rounds = min(effort.most, max(effort.least, affordable))
    found: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        taken = {name: _guarded(sample.take, name, case) for name, case in cases.items()}
        for name, read in taken.items():
            found[name].append(read())
    return found


def _guarded(work: Callable[[str, TimedCase], Made], name: str, case: TimedCase) -> Made:
    try:
        return work(name, case)
    except Exception as problem:
        raise CaseFailed(name, problem) from problem


class _Host:
    """By the clock: on a CPU the call is over when it returns."""

    def warm_up(self, name: str, case: TimedCase) -> float:
        began = time.perf_counter()
        case.timed(case.setup())
        return time.perf_counter() - began

    def take(self, name: str, case: TimedCase) -> Callable[[], float]:
        state = case.setup()
        began = time.perf_counter()
        case.timed(state)
        spent = time.perf_counter() - began
        return lambda: 1000 * max(spent, 1e-9)


class _Device:
    """By events on the device, which the host reads when the round is over."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.buffer = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
        self.flushes: dict[str, int] = {}
        self.flush_s = self._time_flush()

    def warm_up(self, name: str, case: TimedCase) -> float:
        """Seconds that one sample costs; also how far the host must run ahead."""
        host_s = whole_s = 0.0
        for _ in range(3):
            state = case.setup()
            torch.cuda.synchronize(self.device)
            began = time.perf_counter()
            case.timed(state)
            host_s = time.perf_counter() - began
            torch.cuda.synchronize(self.device)
            whole_s = time.perf_counter() - began
        self.flushes[name] = min(MOST_FLUSHES, 1 + math.ceil(1.5 * host_s / self.flush_s))
        return whole_s + self.flushes[name] * self.flush_s

    def take(self, name: str, case: TimedCase) -> Callable[[], float]:
        for _ in range(MOST_TRIES):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
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

    def _time_flush(self) -> float:
        self.buffer.zero_()
        torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        for _ in range(4):
            self.buffer.zero_()
        torch.cuda.synchronize(self.device)
        return (time.perf_counter() - began) / 4
