"""The learning rate at each step: linear warm-up, then cosine decay, none, or warmup-stable-decay.

A schedule is a pure function of the step, so there is no state to save. Cosine decay needs the length of a
run from its start. Warmup-stable-decay (Hu et al. 2024, arXiv:2404.06395) stays at the peak and falls to the
end in the last fifth of the steps, linearly (Hägele et al. 2024, arXiv:2405.18392): most of the run does not
depend on its length.
"""

from __future__ import annotations

import math

from rush.recipe import Recipe

DECAY = 0.2
"""The last fraction of the steps, in which warmup-stable-decay falls."""


def learning_rate(recipe: Recipe, step: int) -> float:
    """The rate of update number `step`, counted from 1; the last update uses `final` of the peak."""
    assert 1 <= step <= recipe.steps, step
    peak, schedule, warmup = recipe.optimizer.lr, recipe.schedule, recipe.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    if schedule.kind == "constant":
        return peak
    if schedule.kind == "wsd":
        falling = min((schedule.decay or DECAY) * recipe.steps, recipe.steps - warmup)
        left = min(1.0, (recipe.steps - step) / falling)
        return peak * (schedule.final + (1 - schedule.final) * left)
    decay_steps = recipe.steps - warmup
    progress = (step - warmup) / decay_steps
    return peak * (schedule.final + (1 - schedule.final) * 0.5 * (1 + math.cos(math.pi * progress)))
