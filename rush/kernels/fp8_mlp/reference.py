"""Llama's MLP with 8-bit factors in plain torch: its forward pass and all gradients, written out.

What stands between the products is made in fp32 and rounded once, to fp8. The wide values of the products
are rounded to `dtype`, as the hardware's are; in float64 nothing is rounded but the factors. Each factor has the
scale of its own largest magnitude.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rush.kernels.fp8_linear.reference import E4M3, E5M2, Scaled, product, quantize

# Shapes: m tokens, d hidden, i width of the MLP, j its double (gate and up side by side).


def swiglu(joined_mj: Tensor) -> Tensor:
    """silu(gate) · up, at least in fp32."""
    gate, up = joined_mj.to(torch.promote_types(joined_mj.dtype, torch.float32)).chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_gradient(dh_mi: Tensor, joined_mj: Tensor) -> Tensor:
    """The gradients of gate and up, side by side, at least in fp32."""
    wide = joined_mj.detach().to(torch.promote_types(joined_mj.dtype, torch.float32)).requires_grad_()
    with torch.enable_grad():
        h = swiglu(wide)
    return torch.autograd.grad(h, wide, dh_mi.to(h.dtype))[0]


def fp8_mlp(
    x_md: Tensor, weight_jd: Tensor, down_di: Tensor, dout_md: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    """The output, and the gradients of x, of gate and up, and of down."""
    x, weight, down = (quantize(factor, E4M3, rowwise=False) for factor in (x_md, weight_jd, down_di))
    joined_mj = product(x, weight, dtype)
    h = quantize(swiglu(joined_mj), E4M3, rowwise=False)
    dout = quantize(dout_md, E5M2, rowwise=False)
    dh_mi = product(dout, _turned(down), dtype)
    djoined = quantize(swiglu_gradient(dh_mi, joined_mj), E5M2, rowwise=False)
    return [
        product(h, down, dtype),
        product(djoined, _turned(weight), dtype),
        product(_turned(djoined), _turned(x), dtype),
        product(_turned(dout), _turned(h), dtype),
    ]


def _turned(factor: Scaled) -> Scaled:
    return Scaled(factor.values.t(), factor.unit)
