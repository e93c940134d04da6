from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rush.data.order import ROUNDS, shuffled

MASK = (1 << 64) - 1
GOLDEN = [
    [2, 3, 5, 7, 0, 1, 9, 4, 6, 8],
    [4, 3, 0, 8, 1, 7, 2, 9, 5, 6],
    [1, 2, 3, 5, 0, 4, 9, 6, 7, 8],
]


def mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def one_by_one(place: int, count: int, seed: int, epoch: int) -> int:
    """The same formula in Python's whole numbers, one place at a time."""
    half = max((count - 1).bit_length() + 1, 2) // 2
    start = mix(mix(seed & MASK) ^ epoch)
    keys = [mix((start + n) & MASK) for n in range(1, ROUNDS + 1)]
    while True:
        left, right = place >> half, place & ((1 << half) - 1)
        for key in keys:
            left, right = right, left ^ (mix(right ^ key) & ((1 << half) - 1))
        place = (left << half) | right
        if place < count:
            return place


def order(count: int, seed: int, epoch: int) -> list[int]:
    return [int(i) for i in shuffled(np.arange(count, dtype=np.int64), count, seed, epoch)]


@given(count=st.integers(1, 600), seed=st.integers(-(2**40), 2**70), epoch=st.integers(0, 1000))
def test_every_sample_comes_exactly_once_per_epoch(count: int, seed: int, epoch: int) -> None:
    assert sorted(order(count, seed, epoch)) == list(range(count))


@given(count=st.integers(1, 2**33), seed=st.integers(0, 2**32), epoch=st.integers(0, 50), data=st.data())
def test_each_position_of_the_shuffle_is_computed_independently(
    count: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    places = data.draw(st.lists(st.integers(0, count - 1), max_size=5))
    found = shuffled(np.array(places, dtype=np.int64), count, seed, epoch)
    assert [int(i) for i in found] == [one_by_one(place, count, seed, epoch) for place in places]


def test_the_order_never_changes_between_versions() -> None:
    assert order(10, seed=0, epoch=0) == GOLDEN[0]
    assert order(10, seed=0, epoch=1) == GOLDEN[1]
    assert order(10, seed=1234, epoch=0) == GOLDEN[2]


def test_the_order_looks_random() -> None:
    """Each sample is equally likely at each place, and neighbours do not stay neighbours."""
    count, trials = 7, 2100
    table = np.zeros((count, count))
    for seed in range(trials):
        table[np.arange(count), order(count, seed, 0)] += 1
    expected = trials / count
    chi_squared = ((table - expected) ** 2 / expected).sum()
    assert chi_squared < 36 + 6 * np.sqrt(2 * 36)  # (7-1)² degrees of freedom, six sigma
    large = np.array(order(20_000, 3, 2))
    assert abs(np.corrcoef(large[:-1], large[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(np.arange(20_000), large)[0, 1]) < 0.03


@pytest.mark.parametrize("epoch", [0, 5])
def test_seeds_and_epochs_give_different_orders(epoch: int) -> None:
    orders = {tuple(order(50, seed, epoch)) for seed in range(20)} | {tuple(order(50, 0, epoch + 1))}
    assert len(orders) == 21
