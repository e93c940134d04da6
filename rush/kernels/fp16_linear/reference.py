"""fp16 linear layers in plain torch: the casts and scales, and emulated matmuls.

An operand is divided into blocks: 64 lines (rows of the left one, columns of the right one) by 128 values along the inner
dim. Each block is multiplied by the power of two that brings its amax to [8, 16) and rounded to fp16. The kernel
accumulates a block in fp16 (128 terms below 256 each cannot overflow) and these sums in fp32. Here all sums are in
float64, so that only the rounding of the operands is left.
"""

from __future__ import annotations

import torch
from torch import Tensor

LINES, INNER = 64, 128
"""Sides of a block: lines with one scale, and terms of one fp16 sum."""
LARGEST = 3
"""Exponent of a block's largest value."""
SMALLEST = -120
"""Blocks whose largest value has a smaller exponent are scaled as if they had this one."""

# Shapes: m rows, k inner, n columns.


def scaled(operand_lk: Tensor) -> tuple[Tensor, Tensor]:
    """An operand [lines, inner] scaled by blocks and rounded to fp16, and each value's inverse scale."""
    lines, inner = operand_lk.shape
    padded = torch.nn.functional.pad(operand_lk, (0, -inner % INNER, 0, -lines % LINES))
    blocks = padded.reshape(padded.shape[0] // LINES, LINES, padded.shape[1] // INNER, INNER)
    scale = scale_for(blocks.abs().amax((1, 3), keepdim=True))
    values, inv_scales = (blocks * scale).half(), scale.reciprocal().expand_as(blocks)
    return _whole(values)[:lines, :inner], _whole(inv_scales)[:lines, :inner]


def _whole(blocks: Tensor) -> Tensor:
    return blocks.flatten(2, 3).flatten(0, 1)


def scale_for(largest: Tensor) -> Tensor:
    """The power of two for blocks with these magnitudes; 1 for zeros, infinities and NaN."""
    _, exponent = torch.frexp(largest)  # of a fraction in [1/2, 1): one more than that of the number
    scale = torch.ldexp(torch.ones_like(largest), LARGEST + 1 - exponent.clamp(min=SMALLEST + 1))
    return torch.where((largest == 0) | ~largest.isfinite(), 1.0, scale)


def fp16_matmul(left_mk: Tensor, right_kn: Tensor) -> Tensor:
    """left · right with both operands rounded as above, rounded once to fp32."""
    left, right = (
        values.double() * inv_scales.double()
        for values, inv_scales in (scaled(left_mk), scaled(right_kn.t()))
    )
    return (left @ right.t()).float()


def fp16_linear(x_mk: Tensor, weight_nk: Tensor, bias_n: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias."""
    out_mn = fp16_matmul(x_mk, weight_nk.t())
    return out_mn if bias_n is None else out_mn + bias_n


def fp16_linear_gradients(dout_mn: Tensor, x_mk: Tensor, weight_nk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias."""
    return fp16_matmul(dout_mn, weight_nk), fp16_matmul(dout_mn.t(), x_mk), dout_mn.sum(0)
