"""The stopwatch, on a CPU and with a stand-in for a GPU's events: how many calls are made, and what a sample is."""

from __future__ import annotations

from itertools import groupby

import pytest

from rush.hardware import stopwatch
from rush.hardware.stopwatch import MOST_CALLS, Effort, TimedCase, take_turns, time_calls


class FakeDevice:
    """Events that read a clock which only work advances; the host is always ahead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call_s: float) -> None:
        self.now, self.call_s = 0.0, call_s
        self.log: list[str] = []
        device = self

        class Event:
            def record(self) -> None:
                self.at = device.now

            def elapsed_time(self, end: Event) -> float:
                return 1000 * (end.at - self.at)

            def query(self) -> bool:
                return False

            def synchronize(self) -> None: ...

        class Buffer:
            def zero_(self) -> None:
                device.now += 1e-3
                device.log.append("flush")

        monkeypatch.setattr(stopwatch, "_events", lambda: (Event(), Event()))
        monkeypatch.setattr(stopwatch, "_flush_buffer", Buffer)
        monkeypatch.setattr(stopwatch, "_wait", lambda device: None)

    def work(self) -> None:
        self.now += self.call_s
        self.log.append("call")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: clock.now)
    return clock


class Clock:
    """A clock that only work advances: a millisecond a call."""

    now = 0.0

    def work(self) -> None:
        self.now += 1e-3


def test_a_sample_is_the_time_of_one_call_however_many_fill_the_window(clock: Clock) -> None:
    found = time_calls(clock.work, "cpu", budget_s=0.0, least=4, window_s=5e-3)
    assert found == pytest.approx([1e-3] * 4)
    assert clock.now == pytest.approx(1e-3 * (1 + 4 * 5)), "one call to warm up, five to a sample"


@pytest.mark.parametrize(("budget_s", "samples"), [(0.0, 3), (0.0065, 5), (1.0, 7)])
def test_the_budget_decides_between_the_least_and_the_most_samples(
    clock: Clock, budget_s: float, samples: int
) -> None:
    assert len(time_calls(clock.work, "cpu", budget_s=budget_s, least=3, most=7, window_s=0.0)) == samples


@pytest.mark.parametrize(("call_s", "calls"), [(1e-3, 1), (1e-5, 20), (1e-9, MOST_CALLS)])
def test_on_a_gpu_a_window_is_filled_with_calls_and_an_event_pair_times_them(
    monkeypatch: pytest.MonkeyPatch, call_s: float, calls: int
) -> None:
    device = FakeDevice(monkeypatch, call_s)
    found = time_calls(device.work, "cuda", budget_s=0.0, least=5, window_s=2e-4)
    assert found == pytest.approx([call_s] * 5, rel=1e-3)
    assert device.log == ["call"] * (3 + 5 * calls), "three to warm up"


def test_cold_calls_are_single_and_each_follows_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice(monkeypatch, 1e-6)
    found = time_calls(device.work, "cuda", budget_s=0.0, least=4, cold=True)
    assert device.log == ["call"] * 3 + ["flush", "call"] * 4
    assert found == pytest.approx([1e-6] * 4, rel=1e-3), "the flush is not timed"


def test_contenders_on_a_gpu_take_turns_behind_flushes_that_are_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice(monkeypatch, 2e-3)
    cases = {
        "once": TimedCase(lambda: None, lambda _: device.work()),
        "twice": TimedCase(lambda: None, lambda _: (device.work(), device.work())),
    }

    class Cuda:
        type = "cuda"

    found = take_turns(cases, Cuda(), Effort(least=3, most=3, budget_s=0.0))  # type: ignore[arg-type]
    assert found == {"once": pytest.approx([2.0] * 3), "twice": pytest.approx([4.0] * 3)}
    order = [what for what, _ in groupby(device.log)][-4:]
    assert order == ["flush", "call", "flush", "call"], "the last round"
