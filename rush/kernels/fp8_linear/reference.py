"""Linear layers with 8-bit factors, in plain torch: the casts, and products as the hardware means them.

A factor is stored as fp8 times one number: of the whole tensor (tensorwise) or of each row (rowwise). The
numbers are powers of two, so scaling rounds nothing; the only rounding is the one to fp8. The casts are
the ones the fast path uses too: plain operators, so that a compiler fuses them into what stands before. The
products here take the factors back to a wide dtype first; they run anywhere, in any precision, slowly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 2.0**-100
"""Stands for the largest magnitude of a tensor of zeros."""
_EXPONENT = 0x7F800000  # the bits of an fp32 that are left of a positive power of two

# Shapes: m tokens, n outputs, k inputs.


class Scaled(NamedTuple):
    """A factor: its 8-bit values, and what to multiply them by."""

    values: Tensor
    unit: Tensor


def scale_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The power of two that brings this magnitude to the upper half of the dtype's range, and not beyond it."""
    exact = torch.finfo(dtype).max / largest.float().clamp(min=SMALLEST)
    return (exact.view(torch.int32) & _EXPONENT).view(torch.float32)


def largest_of(x: Tensor) -> Tensor:
    """The largest magnitude; by rows first, which a compiler can do in the kernel that makes the rows."""
    return x.abs().amax(-1).amax()


def quantize(x: Tensor, dtype: torch.dtype, rowwise: bool) -> Scaled:
    """Cast to fp8 with a scale for each row, or one for all."""
    scale = scale_for(x.abs().amax(-1, keepdim=True) if rowwise else largest_of(x), dtype)
    return Scaled((x.float() * scale).to(dtype), scale.reciprocal())


def product(left: Scaled, right: Scaled, dtype: torch.dtype) -> Tensor:
    """left · rightᵀ, rounded once to `dtype`; computed in fp32, or in float64 if that is asked for."""
    wide = torch.promote_types(dtype, torch.float32)
    a, b = (factor.values.to(wide) * factor.unit.to(wide) for factor in (left, right))
    return (a @ b.t()).to(dtype)


def fp8_linear(x_mk: Tensor, weight_nk: Tensor, rowwise: bool, dtype: torch.dtype) -> Tensor:
    """x · weightᵀ with both factors in e4m3."""
    return product(quantize(x_mk, E4M3, rowwise), quantize(weight_nk, E4M3, rowwise), dtype)


def fp8_linear_gradients(
    dout_mn: Tensor, x_mk: Tensor, weight_nk: Tensor, rowwise: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight; the incoming gradient in e5m2 tensorwise, in e4m3 rowwise."""
    form = E4M3 if rowwise else E5M2
    dx = product(quantize(dout_mn, form, rowwise), quantize(weight_nk.t(), E4M3, rowwise), dtype)
    dweight = product(quantize(dout_mn.t(), form, rowwise), quantize(x_mk.t(), E4M3, rowwise), dtype)
    return dx, dweight
