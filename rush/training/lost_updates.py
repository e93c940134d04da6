"""Whether updates survive rounding.

16-bit weights with round-to-nearest lose every update below half of their last bit: the run continues without an error and
learns little or nothing. An Adam update is at most about the learning rate, so this is known before the first step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rush.parallel.sharded import local_tensor
from rush.training.build import Run

ENOUGH = 0.5
"""The fraction of weights that must be able to change."""
SAMPLED = 1 << 16
"""Values sampled from each tensor."""


def lost_updates_warning(run: Run) -> str | None:
    """A warning where most weights cannot change at the recipe's highest learning rate."""
    if getattr(run.optimizer, "keeps_small_updates", False):
        return None
    lr = run.recipe.optimizer.lr
    trained = [local_tensor(p.detach()).flatten() for p in run.model.parameters() if p.requires_grad]
    counts = [values.numel() for values in trained]
    if not sum(counts):
        return None
    fractions = [movable(values[:: max(1, values.numel() // SAMPLED)].cpu(), lr) for values in trained]
    fraction = sum(each * count for each, count in zip(fractions, counts, strict=True)) / sum(counts)
    if fraction >= ENOUGH:
        return None
    dtype = str(min((values.dtype for values in trained), key=lambda dtype: dtype.itemsize)).removeprefix(
        "torch."
    )
    return (
        f"Only {fraction:.0%} of the weights can change: they are {dtype} with round-to-nearest, and an update at optimizer.lr = {lr:g} "
        "is less than half the last bit of the others. Use stochastic rounding ({name = 'fused_update', stochastic_rounding = true}), "
        "or keep weights in fp32 (bf16_master, amp_bf16)."
    )


def movable(values: Tensor, step: float) -> float:
    """The fraction of values that a step of that size changes after rounding."""
    if not values.numel():
        return 1.0
    _, exponent = torch.frexp(values.float())  # |value| = m · 2^exponent, m from a half to one
    last_bit = torch.ldexp(
        torch.full_like(values, torch.finfo(values.dtype).eps, dtype=torch.float32), exponent - 1
    )
    return float(((values == 0) | (last_bit <= 2 * step)).float().mean())
