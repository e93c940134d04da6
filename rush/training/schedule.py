"""The learning rate at each step: linear warm-up, then cosine decay (or constant).

A pure function of the step, so there is nothing to save: a resumed run asks again.
"""

from __future__ import annotations

import math

from rush.recipe import Recipe


def learning_rate(recipe: Recipe, step: int) -> float:
    """The rate of update number `step`, counted from 1; the last update uses `final` of the peak."""
    assert 1 <= step <= recipe.schedule.steps, step
    peak, schedule = recipe.optimizer.lr, recipe.schedule
    if step <= schedule.warmup:
        return peak * step / schedule.warmup
    if schedule.kind == "constant":
        return peak
    decay_steps = schedule.steps - schedule.warmup
    progress = (step - schedule.warmup) / decay_steps
    return peak * (schedule.final + (1 - schedule.final) * 0.5 * (1 + math.cos(math.pi * progress)))
