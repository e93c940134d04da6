"""int8 linear layers in plain torch: rounding to nearest and stochastic rounding, row by row, and exact matmuls.

A matrix is stored as int8 values times a scale per row: amax / 127. A matmul of two such matrices along their inner dim
is an integer matmul, whose result is multiplied by the scales of its row and its column. So each of a layer's three matmuls
needs its operands with scales along its own outer dims. The GPU path uses the same casts: plain operators, for torch.compile
to fuse.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 127
"""The largest magnitude: -128 is left out, so that the range is symmetric."""
SMALLEST = 2.0**-100
"""The least amax, for a row of zeros."""
NOISE_BITS = 16
"""Bits of a random number for rounding. The mean is off by at most 2⁻¹⁶ of a step."""
_LOW = (1 << NOISE_BITS) - 1

# Shapes: m tokens, n outputs, k inputs.


class Int8Tensor(NamedTuple):
    """int8 values and the scale of each row that dequantizes them."""

    values: Tensor
    inv_scale: Tensor


def quantize(x: Tensor, noise: Tensor | None = None) -> Int8Tensor:
    """Each row scaled by its amax and rounded to the nearest integer; with `noise` (uniform in [0, 1)) stochastically.

    int8 has no NaN or infinity: the scale of a row that is not finite is not finite either, and so is what comes of it.
    """
    inv_scale = x.abs().amax(-1, keepdim=True).float().clamp(min=SMALLEST) / LARGEST
    scaled = x.float() * inv_scale.reciprocal()
    whole = scaled.round() if noise is None else (scaled + noise).floor()
    # Rounded to fp32, amax with noise just below 1 is 128, which would wrap around.
    return Int8Tensor(whole.clamp(-LARGEST, LARGEST).to(torch.int8).contiguous(), inv_scale)


def columns(x: Tensor, noise: Tensor | None = None) -> Int8Tensor:
    """The transpose, quantized with a scale per row."""
    return quantize(x.t(), None if noise is None else noise.t())


def random_bits(rows: int, num_columns: int, seed: Tensor) -> Tensor:
    """32 random bits per element: a hash of seed, row and column.

    A dozen integer operations. Philox takes about a hundred, which by arithmetic is several times what reading and writing
    the element takes.
    """
    # On a GPU products of int32 wrap around. In the C++ that a compiler makes for a CPU their overflow is undefined (gcc
    # concludes that a loop over rows never ends), so there they are int64, cut off to 32 bits.
    dtype = torch.int32 if seed.is_cuda else torch.int64
    row = torch.arange(rows, dtype=dtype, device=seed.device)[:, None]
    column = torch.arange(num_columns, dtype=dtype, device=seed.device)
    # All three are mixed: like seeds would give the same rows in another order, or the same columns.
    return _mix(_cut((_mix(row) ^ _mix(seed.to(dtype))) + column))


def _mix(h: Tensor) -> Tensor:
    """lowbias32 by Chris Wellons: every bit of the result depends on every bit of `h`."""
    h = _cut((h ^ _shift(h, 16)) * 0x7FEB352D)
    h = _cut((h ^ _shift(h, 15)) * (0x846CA68B - (1 << 32)))
    return h ^ _shift(h, 16)


def _cut(h: Tensor) -> Tensor:
    return h if h.dtype == torch.int32 else h & 0xFFFFFFFF


def _shift(h: Tensor, bits: int) -> Tensor:
    """A logical right shift; torch's own repeats the sign bit."""
    return (h >> bits) & ((1 << (32 - bits)) - 1)


def noises(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Two independent uniform numbers in [0, 1) from each 32 bits."""
    step = 2.0**-NOISE_BITS
    return _shift(bits, NOISE_BITS).float() * step, (bits & _LOW).float() * step


def scaled_mm(left: Int8Tensor, right: Int8Tensor, dtype: torch.dtype) -> Tensor:
    """left · rightᵀ in float64, rounded once to `dtype`."""
    a, b = (operand.values.double() * operand.inv_scale.double() for operand in (left, right))
    return (a @ b.t()).to(dtype)


def int8_linear(x_mk: Tensor, weight_nk: Tensor, dtype: torch.dtype) -> Tensor:
    """x · weightᵀ with both operands in int8."""
    return scaled_mm(quantize(x_mk), quantize(weight_nk), dtype)


def int8_linear_gradients(
    dout_mn: Tensor, x_mk: Tensor, weight_nk: Tensor, seed: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight, dout rounded stochastically."""
    by_row, by_column = noises(random_bits(dout_mn.shape[0], dout_mn.shape[1], seed))
    dx = scaled_mm(quantize(dout_mn, by_row), columns(weight_nk), dtype)
    return dx, scaled_mm(columns(dout_mn, by_column), columns(x_mk), dtype)
