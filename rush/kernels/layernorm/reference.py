"""LayerNorm in plain torch: the reference for the kernel's tests, in any dtype, float64 included."""

from __future__ import annotations

import torch
from torch import Tensor


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Computed in fp32 or float64, rounded once at the end."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    wide = x if x.dtype == torch.float64 else x.float()
    centered = wide - wide.mean(-1, keepdim=True)
    scaled = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight + bias).to(dtype)


def add_layernorm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum of both, normalized; and the sum."""
    total = residual + x
    return layernorm(total, weight, bias, eps), total
