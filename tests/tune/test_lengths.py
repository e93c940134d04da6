"""The search for the longest sequence, against a device whose memory is what the planner says."""

from __future__ import annotations

import pytest

from rush.recipe import Recipe
from rush.recipe_io import load_recipe
from rush.tune.forecast import Prediction
from rush.tune.goal import Goal, TrialLimit, TuneResult
from rush.tune.lengths import at_length, lengthen
from tests.tune.simulated import Table, planner_of, search_for


def test_tokens_of_a_step_are_rounded_to_whole_sequences() -> None:
    recipe = load_recipe("llama-3.2-1b")
    longer = at_length(recipe, 3 * 2**14)
    assert (longer.micro, longer.batch.sequence) == (1, 49_152)
    assert longer.step_tokens == 11 * 49_152


class Full(Table):
    """Out of memory where the planner says so."""

    def trial(self, kind: str, recipe: Recipe, limit: TrialLimit) -> TuneResult:
        predicted = planner_of("h200-sxm").predict(recipe)
        fits = isinstance(predicted, Prediction) and predicted.fits
        return (
            super().trial(kind, recipe, limit) if fits else TuneResult("out_of_memory", "full", wall_s=20.0)
        )


@pytest.mark.slow
def test_techniques_that_save_memory_are_added() -> None:
    recipe = load_recipe("llama-3.2-1b", ['techniques=["amp_bf16"]', "batch.micro=1"])
    search = search_for(recipe, Full({}, {1: 1.0}), goal=Goal("longest-sequence"))
    winner = lengthen(search)
    names = {name for name, _ in winner.known_recipe.technique_uses()}
    assert winner.known_recipe.batch.sequence >= 16 * recipe.batch.sequence
    assert names & {"flash_attention", "cudnn_attention", "triton_attention", "flex_attention"}
    assert search.outlook.fits(winner.known_recipe)
    assert search.budget.spent_s <= 900
