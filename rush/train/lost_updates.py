"""Whether updates survive being rounded.

Weights of 16 bits that are rounded to the nearest keep nothing of an update below half of their last bit: the run goes on,
fast and without an error, and learns little or nothing. An update of Adam is at most about the learning rate, so it can
be told before the first step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rush.parallel.sharded import local_tensor
from rush.train.build import Run

ENOUGH = 0.5
"""The share of weights that must be able to move."""
SAMPLED = 1 << 16
"""Values looked at of each tensor."""


def lost_updates_warning(run: Run) -> str | None:
    """What to tell where most weights cannot move at the recipe's highest learning rate; None where they can."""
    if getattr(run.optimizer, "keeps_small_updates", False):
        return None
    lr = run.recipe.optimizer.lr
    trained = [local_tensor(p.detach()).flatten() for p in run.model.parameters() if p.requires_grad]
    counts = [values.numel() for values in trained]
    if not sum(counts):
        return None
    shares = [movable(values[:: max(1, values.numel() // SAMPLED)].cpu(), lr) for values in trained]
    share = sum(part * count for part, count in zip(shares, counts, strict=True)) / sum(counts)
    if share >= ENOUGH:
        return None
    dtype = str(min((values.dtype for values in trained), key=lambda dtype: dtype.itemsize)).removeprefix(
        "torch."
    )
    return (
        f"Only {share:.0%} of the weights can move: they are {dtype}, rounded to the nearest, and an update at optimizer.lr = {lr:g} "
        "is less than half the last bit of the others. Round by chance ({name = 'fused_update', stochastic_rounding = true}), or "
        "keep weights in fp32 (bf16_master, amp_bf16)."
    )


def movable(values: Tensor, step: float) -> float:
    """The share of values that another number is nearest to after a step of that size."""
    if not values.numel():
        return 1.0
    _, exponent = torch.frexp(values.float())  # |value| = m · 2^exponent, m from a half to one
    last_bit = torch.ldexp(
        torch.full_like(values, torch.finfo(values.dtype).eps, dtype=torch.float32), exponent - 1
    )
    return float(((values == 0) | (last_bit <= 2 * step)).float().mean())
