"""The length of a run in passes over its data: `schedule.epochs`, and the warning about repetition before the first step.

The number of steps per epoch depends on the prepared data, the packing and the batch, so it is known once the loader exists.
The run's recipe then records both. Repeated data help less with every pass: in Muennighoff et al. 2023 (arXiv 2305.16264) up to
four epochs were nearly as good as new data, and after about sixteen there was no further gain.
"""

from __future__ import annotations

from bisect import bisect_left

from rush.data import Steps
from rush.errors import RecipeError
from rush.recipe import Recipe
from rush.recipe_io import parse

MANY_EPOCHS = 4.0
"""Epochs beyond which a run warns about repetition."""
FEW_EPOCHS = 0.05
"""Fraction of the fine-tuning data below which a run warns that most of it is not read."""


def with_steps(recipe: Recipe, loader: Steps) -> Recipe:
    """The recipe with the number of steps that its epochs have on this data; unchanged where it names none."""
    epochs = recipe.schedule.epochs
    if epochs is None:
        return recipe
    steps = steps_for(recipe, loader.steps_in(epochs) * recipe.step_tokens)
    if recipe.schedule.steps not in (None, steps):
        raise RecipeError(
            f"schedule.steps is {recipe.schedule.steps:,}, but schedule.epochs = {epochs:g} of this data are {steps:,} steps; "
            "leave one of the two out."
        )
    return resolved(recipe, steps)


def steps_for(recipe: Recipe, tokens: int) -> int:
    """The steps in which a run reads at least so many tokens; with a batch-size schedule more than of the largest batch."""
    most = -(-tokens // recipe.step_sizes[0])
    return bisect_left(range(most), tokens, lo=1, key=lambda steps: recipe.batch_sizes(steps).until(steps))


def resolved(recipe: Recipe, steps: int) -> Recipe:
    """The recipe with the number of steps of its epochs."""
    tree = recipe.model_dump(exclude_none=True)
    return parse({**tree, "schedule": {**tree["schedule"], "steps": steps}})


def repetition_advice(recipe: Recipe, loader: Steps) -> str | None:
    """A warning if the run reads its data many times, or only a small part; None otherwise."""
    epochs = loader.epochs_in(recipe.run_tokens / recipe.step_tokens)
    once = steps_for(recipe, loader.steps_in(1.0) * recipe.step_tokens)
    if epochs > MANY_EPOCHS:
        return (
            f"The training data will be read {epochs:.3g} times: {recipe.steps:,} steps, one pass is {once:,}. Beyond about four "
            "passes repetition helps little, and the model overfits; set schedule.epochs=3, or add data."
        )
    if recipe.objective.kind != "lm" and epochs < FEW_EPOCHS:
        return (
            f"Only {epochs:.1%} of the training data will be read in {recipe.steps:,} steps; schedule.epochs=1 would be "
            f"{once:,} steps."
        )
    return None
