"""The learning rate at each step: linear warm-up, then cosine decay (or constant).

A pure function of the step, so there is nothing to save: a resumed run asks again.
"""

from __future__ import annotations

import math

from rush.recipe import Recipe


def learning_rate(recipe: Recipe, step: int) -> float:
    """The rate of update number `step`, counted from 1; the last update uses `final` of the peak."""
    assert 1 <= step <= recipe.steps, step
    peak, schedule, warmup = recipe.optimizer.lr, recipe.schedule, recipe.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if schedule.kind == "constant":
        return peak
    decay_steps = recipe.steps - warmup
    progress = (step - warmup) / decay_steps
    return peak * (schedule.final + (1 - schedule.final) * 0.5 * (1 + math.cos(math.pi * progress)))
