"""Objectives: what a run minimizes. `objective.kind` selects one; loop, step and lab know none by name.

A step minimizes the mean over its *units*: labels for next-token objectives, pairs for preferences. Each
micro batch adds the gradient of its summed loss over the number of units in the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor, nn

from rush.data import Batch
from rush.recipe import Recipe
from rush.training.objectives.next_token import NextToken
from rush.training.objectives.preference import Preference

Add = Callable[[Tensor], Tensor]

__all__ = ["NextToken", "Objective", "Preference", "objective_of"]


class Objective(Protocol):
    unit: str
    """What the mean is over, for messages: label, pair."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The summed loss of a micro batch, fp32, for backward to start from."""
        ...

    def units(self, batch: Batch) -> int:
        """How many units a micro batch holds; it is asked before the batch goes to the device."""
        ...

    def figures(self, add: Add = ...) -> Mapping[str, float]:
        """Further metrics of the step since the last call; `add` sums over the ranks with other samples of it."""
        ...


def objective_of(recipe: Recipe) -> Objective:
    """The objective a recipe names; settings that do not belong to it are refused."""
    return Preference(recipe) if recipe.objective.kind == "dpo" else NextToken()
