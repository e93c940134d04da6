"""AdamW and stochastic rounding to bf16 in plain torch: the references, in any dtype, float64 included."""

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
    """fp32 to bf16 with stochastic rounding: `bits` are uniform integers below 2¹⁶.

    bf16 is the upper half of fp32. Adding random lower bits before truncation carries into the upper half with a
    probability equal to the remainder, so the result is unbiased.
    """
    rounded = (x.view(torch.int32) + bits.to(torch.int32)) & -65536
    return torch.where(x.isnan(), x, rounded.view(torch.float32)).to(torch.bfloat16)
