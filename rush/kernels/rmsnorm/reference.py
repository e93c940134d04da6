"""RMSNorm in plain torch: the reference for the kernel's tests, in any dtype, float64 included."""

from __future__ import annotations

import torch
from torch import Tensor


def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize by the root mean square, round to the input's dtype, multiply by the weight."""
    wide = x if x.dtype == torch.float64 else x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of both, normalized; and the sum."""
    total = residual + x
    return rmsnorm(total, weight, eps), total
