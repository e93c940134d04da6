from __future__ import annotations

from rush.lab.ladder.limits import batch_curve, longest, stops_paying
from rush.lab.trial.trial import Outcome

GIB = 2**30


class Device:
    """A made-up device: memory is a line in the batch, speed saturates."""

    def __init__(self, memory: int, fixed: int, each: int, saturates_at: int) -> None:
        self.memory, self.fixed, self.each, self.saturates_at = memory, fixed, each, saturates_at
        self.tried: list[int] = []

    def __call__(self, size: int) -> Outcome:
        self.tried.append(size)
        needed = self.fixed + self.each * size
        if needed > self.memory:
            return Outcome("out_of_memory", "made up")
        speed = 1000.0 * min(size, self.saturates_at)
        timing = {
            "step_tokens": 100 * size,
            "samples_s": [100 * size / speed] * 5,
            "peak_memory_bytes": needed,
        }
        return Outcome("ok", None, {"timing": timing})


def test_the_curve_ends_at_the_largest_power_of_two_that_fits() -> None:
    device = Device(memory=20 * GIB, fixed=2 * GIB, each=GIB, saturates_at=4)
    curve = batch_curve(device, 1024, device.memory)
    assert [point["micro"] for point in curve] == [1, 2, 4, 8, 16]
    assert device.tried == [1, 2, 4, 8, 16]  # 32 would need 34 GiB: the line says so, and it is not tried
    assert stops_paying(curve) == 4


def test_the_curve_may_begin_above_one() -> None:
    device = Device(memory=20 * GIB, fixed=2 * GIB, each=GIB, saturates_at=4)
    assert [point["micro"] for point in batch_curve(device, 12, device.memory, first=3)] == [3, 6, 12]


def test_a_size_near_the_limit_is_tried_and_its_failure_is_a_point() -> None:
    device = Device(memory=33 * GIB, fixed=2 * GIB, each=GIB, saturates_at=1000)
    curve = batch_curve(device, 1024, device.memory)
    assert curve[-1]["micro"] == 32
    assert curve[-1]["status"] == "out_of_memory"
    assert stops_paying(curve) is None  # doubling still paid when memory ended it


def test_neighbours_close_in_on_the_largest_batch() -> None:
    device = Device(memory=29 * GIB, fixed=2 * GIB, each=GIB, saturates_at=1000)
    curve = batch_curve(device, 1024, device.memory, neighbours=True)
    fitting = [point["micro"] for point in curve if point["status"] == "ok"]
    assert 22 <= max(fitting) <= 27


def test_neighbours_come_within_a_quarter_of_any_largest_batch() -> None:
    for largest in range(2, 70):
        device = Device(memory=(2 + largest) * GIB, fixed=2 * GIB, each=GIB, saturates_at=1000)
        curve = batch_curve(device, 1024, device.memory, neighbours=True)
        found = max(point["micro"] for point in curve if point["status"] == "ok")
        assert largest - max(1, found // 4) < found <= largest, largest


def test_the_longest_sequence_is_found_to_an_eighth() -> None:
    device = Device(memory=5000, fixed=0, each=1, saturates_at=10**9)
    found, points = longest(device, 512, 10**6, device.memory)
    assert found is not None
    assert 5000 * 7 / 8 <= found <= 5000
    assert all(point["status"] == "ok" for point in points if point["micro"] <= 5000)


def test_a_sequence_that_always_fits_ends_at_the_limit_asked_for() -> None:
    device = Device(memory=10**9, fixed=0, each=1, saturates_at=10**9)
    assert longest(device, 128, 1000, device.memory)[0] in range(896, 1001)
