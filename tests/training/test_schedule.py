"""The learning rate, against values worked out by hand."""

from __future__ import annotations

import itertools
import math

import pytest

from rush.recipe_io import load_recipe
from rush.training.schedule import learning_rate


def rates(*overrides: str) -> list[float]:
    recipe = load_recipe("tiny", ["optimizer.lr=0.8", "schedule.steps=20", "schedule.warmup=4", *overrides])
    return [learning_rate(recipe, step) for step in range(1, recipe.schedule.steps + 1)]


def test_warm_up_rises_linearly_to_the_peak() -> None:
    assert rates()[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])


def test_cosine_falls_from_the_peak_to_a_tenth_of_it() -> None:
    decay = rates()[3:]
    assert all(later < earlier for earlier, later in itertools.pairwise(decay))
    assert decay[-1] == pytest.approx(0.08)
    assert decay[8] == pytest.approx((0.8 + 0.08) / 2)  # half-way down in time is half-way down in height
    assert decay[4] == pytest.approx(0.08 + 0.72 * (1 + math.cos(math.pi / 4)) / 2)


def test_constant_stays_at_the_peak() -> None:
    assert rates("schedule.kind=constant")[4:] == [0.8] * 16


def test_no_warm_up_begins_just_below_the_peak() -> None:
    first = rates("schedule.warmup=0")[0]
    assert 0.79 < first < 0.8
