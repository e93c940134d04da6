# mypy: allow-untyped-decorators
"""fp8 operands and their matmul: `torch._scaled_mm` on a GPU, emulated on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from rush.kernels.fp8_linear import reference
from rush.kernels.fp8_linear.reference import E4M3, Fp8Tensor, amax, quantize, scale_for
from rush.kernels.support import op

# Shapes: m tokens, n outputs, k inputs.


def cast_transpose(x: Tensor, dtype: torch.dtype) -> tuple[Fp8Tensor, Fp8Tensor]:
    """An operand and its transpose with one scale, by plain operators that torch.compile fuses."""
    values, inv_scale = quantize(x, dtype, rowwise=False)
    return Fp8Tensor(values, inv_scale), transposed(values, inv_scale)


def cast_transpose_triton(x: Tensor, dtype: torch.dtype) -> tuple[Fp8Tensor, Fp8Tensor]:
    """The same by one Triton kernel."""
    scale = scale_for(amax(x), dtype)
    values, values_t = _cast_transpose(x, scale, dtype)
    return Fp8Tensor(values, scale.reciprocal()), Fp8Tensor(values_t, scale.reciprocal())


def transposed(values: Tensor, inv_scale: Tensor) -> Fp8Tensor:
    return Fp8Tensor(values.t().contiguous(), inv_scale)


def transposed_weight(weight_nk: Tensor, inv_scale: Tensor) -> Fp8Tensor:
    """The transpose of a weight whose scale is known: a power of two, so the values equal those of the first cast."""
    return Fp8Tensor((weight_nk.t().float() * inv_scale.reciprocal()).to(E4M3).contiguous(), inv_scale)


def scaled_mm(left: Fp8Tensor, right: Fp8Tensor, dtype: torch.dtype, fast_accum: bool) -> Tensor:
    """left · rightᵀ; both are contiguous along the inner dim."""
    if left.values.is_cuda:
        right_inv_scale = right.inv_scale if right.inv_scale.dim() == 0 else right.inv_scale.t()
        return torch._scaled_mm(
            left.values,
            right.values.t(),
            scale_a=left.inv_scale,
            scale_b=right_inv_scale,
            out_dtype=dtype,
            use_fast_accum=fast_accum,
        )
    out: Tensor = _emulated_matmul(
        left.values, left.inv_scale, right.values, right.inv_scale, dtype, fast_accum
    )
    return out


@op("fp8_emulated_matmul")
def _emulated_matmul(
    left: Tensor,
    left_inv_scale: Tensor,
    right: Tensor,
    right_inv_scale: Tensor,
    dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    # The emulation accumulates in fp32; the flag is an argument so that a profile shows what a GPU would be asked for.
    with torch.autocast(left.device.type, enabled=False):
        return reference.scaled_mm(Fp8Tensor(left, left_inv_scale), Fp8Tensor(right, right_inv_scale), dtype)


@_emulated_matmul.register_fake
def _(left: Tensor, _: Tensor, right: Tensor, __: Tensor, dtype: torch.dtype, fast_accum: bool) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[0], dtype=dtype)


@op("fp8_cast_transpose")
def _cast_transpose(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    from rush.kernels.fp8_linear import triton as kernels

    return kernels.cast_transpose(x, scale, dtype)


@_cast_transpose.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    return x.new_empty(rows, columns, dtype=dtype), x.new_empty(columns, rows, dtype=dtype)
