"""fp8 linear layers in plain torch: the casts, and emulated matmuls.

A tensor is stored as fp8 values times a scale: one for the tensor (tensorwise) or one per row (rowwise). Scales are
powers of two, so the only rounding is the one to fp8. The GPU path uses the same casts: plain operators, for
torch.compile to fuse. The matmuls here dequantize their operands first; they run anywhere, in any precision, slowly.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALLEST = 2.0**-100
"""The least amax, for a tensor of zeros."""
_EXPONENT = 0x7F800000  # the exponent bits of an fp32

# Shapes: m tokens, n outputs, k inputs.


class Fp8Tensor(NamedTuple):
    """fp8 values and the scale that dequantizes them."""

    values: Tensor
    inv_scale: Tensor


def scale_for(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest power of two that keeps amax within the dtype's range."""
    exact = torch.finfo(dtype).max / amax.float().clamp(min=SMALLEST)
    return (exact.view(torch.int32) & _EXPONENT).view(torch.float32)


def amax(x: Tensor) -> Tensor:
    """The largest magnitude; by rows first, which torch.compile can fuse into the kernel that writes the rows."""
    return x.abs().amax(-1).amax()


def quantize(x: Tensor, dtype: torch.dtype, rowwise: bool) -> Fp8Tensor:
    """Cast to fp8 with one scale per row, or one for the tensor."""
    scale = scale_for(x.abs().amax(-1, keepdim=True) if rowwise else amax(x), dtype)
    return Fp8Tensor((x.float() * scale).to(dtype), scale.reciprocal())


def scaled_mm(left: Fp8Tensor, right: Fp8Tensor, dtype: torch.dtype) -> Tensor:
    """left · rightᵀ, rounded once to `dtype`; computed in fp32, or in float64 where `dtype` is that."""
    wide = torch.promote_types(dtype, torch.float32)
    a, b = (operand.values.to(wide) * operand.inv_scale.to(wide) for operand in (left, right))
    return (a @ b.t()).to(dtype)


def fp8_linear(x_mk: Tensor, weight_nk: Tensor, rowwise: bool, dtype: torch.dtype) -> Tensor:
    """x · weightᵀ with both operands in e4m3."""
    return scaled_mm(quantize(x_mk, E4M3, rowwise), quantize(weight_nk, E4M3, rowwise), dtype)


def fp8_linear_gradients(
    dout_mn: Tensor, x_mk: Tensor, weight_nk: Tensor, rowwise: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight; dout in e5m2 tensorwise, in e4m3 rowwise."""
    fp8 = E4M3 if rowwise else E5M2
    dx = scaled_mm(quantize(dout_mn, fp8, rowwise), quantize(weight_nk.t(), E4M3, rowwise), dtype)
    dweight = scaled_mm(quantize(dout_mn.t(), fp8, rowwise), quantize(x_mk.t(), E4M3, rowwise), dtype)
    return dx, dweight
