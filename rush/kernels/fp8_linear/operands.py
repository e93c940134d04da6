# mypy: allow-untyped-decorators
"""8-bit factors and their product, on a GPU by its units, on a CPU emulated: what all layers in fp8 are made of."""

from __future__ import annotations

import torch
from torch import Tensor

from rush.kernels.fp8_linear import reference
from rush.kernels.fp8_linear.reference import E4M3, Scaled, largest_of, quantize, scale_for
from rush.kernels.support import op

# Shapes: m tokens, n outputs, k inputs.


def cast(x: Tensor, dtype: torch.dtype) -> tuple[Scaled, Scaled]:
    """A factor and its transpose with one scale, by plain operators that a compiler fuses."""
    values, unit = quantize(x, dtype, rowwise=False)
    return Scaled(values, unit), turned(values, unit)


def cast_by_kernel(x: Tensor, dtype: torch.dtype) -> tuple[Scaled, Scaled]:
    """The same by one kernel."""
    scale = scale_for(largest_of(x), dtype)
    values, turned_over = cast_both(x, scale, dtype)
    return Scaled(values, scale.reciprocal()), Scaled(turned_over, scale.reciprocal())


def turned(values: Tensor, unit: Tensor) -> Scaled:
    """A factor that was cast already, turned over."""
    return Scaled(values.t().contiguous(), unit)


def turned_weight(weight_nk: Tensor, unit: Tensor) -> Scaled:
    """The transpose of a weight whose unit is known: the scale is a power of two, so it is exactly the first cast."""
    return Scaled((weight_nk.t().float() * unit.reciprocal()).to(E4M3).contiguous(), unit)


def product(left: Scaled, right: Scaled, dtype: torch.dtype, fast: bool) -> Tensor:
    """left · rightᵀ; both have the inner dim side by side. `fast`: with the short accumulator."""
    if left.values.is_cuda:
        right_unit = right.unit if right.unit.dim() == 0 else right.unit.t()
        return torch._scaled_mm(
            left.values,
            right.values.t(),
            scale_a=left.unit,
            scale_b=right_unit,
            out_dtype=dtype,
            use_fast_accum=fast,
        )
    out: Tensor = _emulated_product(left.values, left.unit, right.values, right.unit, dtype)
    return out


@op("fp8_emulated_matmul")
def _emulated_product(
    left: Tensor, left_unit: Tensor, right: Tensor, right_unit: Tensor, dtype: torch.dtype
) -> Tensor:
    with torch.autocast(left.device.type, enabled=False):
        return reference.product(Scaled(left, left_unit), Scaled(right, right_unit), dtype)


@_emulated_product.register_fake
def _(left: Tensor, left_unit: Tensor, right: Tensor, right_unit: Tensor, dtype: torch.dtype) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[0], dtype=dtype)


@op("fp8_cast_both")
def cast_both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x · scale in fp8 and its transpose, by the kernel."""
    from rush.kernels.fp8_linear import triton as kernels

    return kernels.cast_both(x, scale, dtype)


@cast_both.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    return x.new_empty(rows, columns, dtype=dtype), x.new_empty(columns, rows, dtype=dtype)
