"""When one recipe is ahead of another: by the medians of their samples, or batch by batch where batches differ."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from rush.lab.paired import Timed
from rush.lab.trial.timing import COMMON
from rush.recipe_io import load_recipe
from rush.tune.goal import TuneResult, gain
from rush.tune.trials import LONG, ONCE, RANK, TuneSettings, trial_plan

TOKENS = (410, 655, 520, 488, 702, 371, 590, 444, 630, 505, 468, 560)


def on_batches(
    speed: float, tokens: Sequence[int] = TOKENS, seed: int = 0, steps: Sequence[int] | None = None
) -> TuneResult:
    """A trial whose steps all take as long, to half a per cent, so that its rates scatter as its batches do."""
    drawn = random.Random(seed)
    rates = [count * speed * (1 + drawn.uniform(-0.005, 0.005)) for count in tokens]
    began = tuple(steps or range(9, 9 + len(tokens)))
    return TuneResult("ok", None, rates, batches=(Timed(rates, tokens, began),))


@pytest.mark.parametrize(("more", "believed"), [(1.05, True), (1.0, False), (0.95, False)])
def test_five_per_cent_are_seen_through_batches_that_differ_by_half(more: float, believed: bool) -> None:
    before, after = on_batches(1.0, seed=1), on_batches(more, seed=2)
    found = gain(before, after)
    assert found.paired == len(TOKENS)
    assert found.ratio == pytest.approx(more, rel=0.005)
    assert found.faster is believed
    assert not gain(TuneResult("ok", None, before.rates), TuneResult("ok", None, after.rates)).faster


def test_of_a_recipe_that_was_timed_twice_both_timings_count_batch_by_batch() -> None:
    lead = on_batches(1.0, seed=1).pooled(on_batches(1.02, (*TOKENS[:8],), seed=2))
    found = gain(lead, on_batches(1.06, seed=3))
    assert found.paired == 8
    assert found.ratio == pytest.approx(1.06 / 1.01, rel=0.01)
    assert found.faster


def test_other_batches_are_compared_by_their_medians() -> None:
    packed, padded = on_batches(1.0), on_batches(1.05, TOKENS[::-1])
    assert gain(packed, padded).paired is None
    later = on_batches(1.05, steps=range(33, 33 + len(TOKENS)))
    assert gain(packed, later).paired is None
    twice = packed.pooled(on_batches(1.0, seed=4))
    medians = gain(TuneResult("ok", None, twice.rates), TuneResult("ok", None, padded.rates))
    assert gain(twice, padded) == medians, "as of one process, since nothing tells them apart"


def test_batches_that_are_all_alike_are_not_paired() -> None:
    assert gain(on_batches(1.0, (512,) * 12), on_batches(1.1, (512,) * 12, 1)).paired is None


@pytest.mark.parametrize("name", ["tiny", "sft-tiny", "sft-lora-tiny", "dpo-tiny"])
def test_trials_of_conversations_time_step_by_step_and_enough_of_them(name: str) -> None:
    recipe = load_recipe(name)
    alike = recipe.objective.kind == "lm"
    for measure in (RANK, LONG):
        timing = trial_plan(recipe, TuneSettings(recipe.step_tokens), measure).measure
        assert (timing == measure) is alike
        if not alike:
            assert timing.window_ms <= 1, "any step is longer, so that a sample is one"
            assert timing.windows == 12
            assert timing.warmup_max_steps + 1 == COMMON, (
                "the first step and these: none goes on to the next multiple"
            )
            assert timing.timed_max_s == measure.timed_max_s
    assert trial_plan(recipe, TuneSettings(recipe.step_tokens), ONCE).measure == ONCE
