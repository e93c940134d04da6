"""AdamW in plain torch, and rounding to bf16 by chance: the definitions, in any dtype, float64 included."""

from __future__ import annotations

import torch
from torch import Tensor


def adamw_(
    parameter: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """One update of one tensor, the first being step 1; arithmetic in fp32 (fp64 for fp64), rounded once at the end."""
    wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    p, g, m, v = (tensor.to(wide) for tensor in (parameter, gradient, exp_avg, exp_avg_sq))
    beta1, beta2 = betas
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    denominator = v.sqrt() / (1 - beta2**step) ** 0.5 + eps
    p = p * (1 - lr * weight_decay) - lr / (1 - beta1**step) * m / denominator
    parameter.copy_(p)
    exp_avg.copy_(m)
    exp_avg_sq.copy_(v)


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """fp32 to bf16, up or down by chance: `bits` are whole numbers below 2¹⁶, evenly distributed.

    A bf16 number is the upper half of an fp32 one. Adding a random lower half before cutting it off carries into
    the upper half with a probability equal to what is cut off, so the result is right on average.
    """
    cut = (x.view(torch.int32) + bits.to(torch.int32)) & -65536
    return torch.where(x.isnan(), x, cut.view(torch.float32)).to(torch.bfloat16)
