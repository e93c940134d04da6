"""The learning rate, against values worked out by hand."""

from __future__ import annotations

import itertools
import math

import pytest

from rush.errors import RecipeError
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


def test_wsd_stays_at_the_peak_and_falls_linearly_in_the_last_fifth() -> None:
    found = rates("schedule.kind=wsd")
    assert found[3:16] == [0.8] * 13
    assert found[16:] == pytest.approx([0.62, 0.44, 0.26, 0.08])


def test_wsd_decays_for_the_fraction_of_steps_that_is_asked_for() -> None:
    found = rates("schedule.kind=wsd", "schedule.decay=0.5", "schedule.final=0")
    assert found[3:10] == [0.8] * 7
    assert found[10:] == pytest.approx([0.8 * left / 10 for left in range(9, -1, -1)])


def test_a_wsd_whose_warm_up_reaches_into_the_decay_falls_from_the_peak() -> None:
    found = rates("schedule.kind=wsd", "schedule.decay=1", "schedule.final=0")
    assert found[3] == 0.8
    assert found[4:] == pytest.approx([0.8 * left / 16 for left in range(15, -1, -1)])


def test_a_decay_that_the_schedule_does_not_have_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"decay is 0.3 and schedule.kind is cosine; .*schedule.kind=wsd"):
        rates("schedule.decay=0.3")


def test_recipes_without_a_decay_keep_their_digests() -> None:
    """The digest of `tiny` from before there was a decay would change with any key that is added to it."""
    assert "decay" not in load_recipe("tiny").content()["schedule"]
    assert (
        load_recipe("tiny", ["schedule.kind=wsd", "schedule.decay=0.3"]).content()["schedule"]["decay"] == 0.3
    )
