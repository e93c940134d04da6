"""Linear layers with fp16 factors, in plain torch: the casts and scales, and products as the kernel means them.

A factor is cut into squares of 64 by 64 values. Each is multiplied by the power of two that brings its largest magnitude
to [8, 16) and rounded to fp16; scaling rounds nothing. Products of two squares are added up in fp16 (64 terms below 256
each cannot reach fp16's largest number), their sums in fp32. Here the sums of fp16 are made in the dtype that is asked for, so
that what is left is the rounding of the factors alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

SQUARE = 64
"""Sides of a square: values with one scale, and products in one fp16 sum."""
LARGEST = 3
"""Exponent of a square's largest value."""
SMALLEST = -120
"""Squares whose largest value has a smaller exponent are scaled as if they had this one."""

# Shapes: m rows, k inner, n columns.


def rounded(factor: Tensor) -> Tensor:
    """A factor [rows, columns] as the kernel sees it: scaled by squares, rounded to fp16, and scaled back, in float64."""
    rows, columns = factor.shape
    over = (-rows % SQUARE, -columns % SQUARE)
    padded = torch.nn.functional.pad(factor, (0, over[1], 0, over[0]))
    squares = padded.unflatten(0, (-1, SQUARE)).unflatten(2, (-1, SQUARE))
    scale = scale_for(squares.abs().amax((1, 3), keepdim=True))
    values = (squares * scale).half().double() / scale.double()
    return values.flatten(2, 3).flatten(0, 1)[:rows, :columns]


def scale_for(largest: Tensor) -> Tensor:
    """The power of two for squares with these magnitudes; 1 for zeros, infinities and NaN."""
    _, exponent = torch.frexp(largest)  # of a fraction in [1/2, 1): one more than that of the number
    scale = torch.ldexp(torch.ones_like(largest), LARGEST + 1 - exponent.clamp(min=SMALLEST + 1))
    return torch.where((largest == 0) | ~largest.isfinite(), 1.0, scale)


def half_product(left_mk: Tensor, right_kn: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """left · right with both factors rounded as above, rounded once to `dtype`."""
    return (rounded(left_mk) @ rounded(right_kn)).to(dtype)


def half_linear(x_mk: Tensor, weight_nk: Tensor, bias_n: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias."""
    out_mn = half_product(x_mk, weight_nk.t())
    return out_mn if bias_n is None else out_mn + bias_n


def half_linear_gradients(
    dout_mn: Tensor, x_mk: Tensor, weight_nk: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias."""
    return half_product(dout_mn, weight_nk), half_product(dout_mn.t(), x_mk), dout_mn.sum(0)
