"""What cuda_graph refuses, without a GPU; the rest is in tests/gpu."""

from __future__ import annotations

import pytest

from rush.errors import RecipeError
from rush.techniques import check_recipe
from tests.techniques.tiny_runs import recipe_of

WRITTEN = "{name='cuda_graph', gradients='written'}"


def test_gradients_that_add_up_are_not_written_over() -> None:
    check_recipe(recipe_of(WRITTEN))
    check_recipe(recipe_of("cuda_graph", overrides=["batch.micro=2"]))
    with pytest.raises(
        RecipeError, match="a step here is 2 micro batches, whose gradients accumulate; allowed is 'added'"
    ):
        check_recipe(recipe_of(WRITTEN, overrides=["batch.micro=2"]))
