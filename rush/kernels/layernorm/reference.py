"""LayerNorm in plain torch: the definition the kernel is held against, in any dtype, float64 included."""

from __future__ import annotations

import torch
from torch import Tensor


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Centre and scale each vector, then a learned gain and offset; rounded once, at the end."""
    dtype = torch.promote_types(x.dtype, weight.dtype)
    wide = x if x.dtype == torch.float64 else x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    scaled = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (scaled * weight + bias).to(dtype)


def add_layernorm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum of both, normalized; and the sum."""
    total = residual + x
    return layernorm(total, weight, bias, eps), total
