# mypy: allow-untyped-decorators
"""Linear layers whose three matrix products (forward, and both gradients) have 8-bit factors.

The units for 8-bit floats do twice the work of those for 16 bits. What it costs is precision, and the
casts: the largest magnitude of every factor is found anew each time (dynamic scaling) and the factor is
rounded. Weights, activations and gradients outside stay as they are; the casts are made on the way in.

The matmul itself is torch's (`torch._scaled_mm`: cuBLAS or CUTLASS), which on Hopper wants both factors with
the inner dim side by side. So transposed factors are cast straight into the transposed layout. The casts
are plain operators by default, for a compiler to fuse with what stands before and after: use this under
torch.compile, where it shines; eager it launches a dozen small kernels. `casts="kernel"` makes both layouts
of a factor in one Triton kernel instead.

On a CPU with TRITON_INTERPRET=1 the products are emulated (operator `rush::fp8_emulated_product`), for tests.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from rush.kernels.fp8_linear import reference
from rush.kernels.fp8_linear import triton as kernels
from rush.kernels.fp8_linear.reference import E4M3, E5M2, Scaled, largest_of, quantise, scale_for
from rush.kernels.support import need, need_device, op

__all__ = ["ALIGNMENT", "fp8_linear"]

ALIGNMENT = 16
"""Bytes that every row of a factor must be a multiple of: the hardware loads that many at a time."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CAPABILITY = (8, 9)

# Shapes: m tokens, n outputs, k inputs.


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    *,
    recipe: Literal["tensorwise", "rowwise"] = "tensorwise",
    fast: Literal["forward", "all"] = "forward",
    casts: Literal["compiler", "kernel"] = "compiler",
) -> Tensor:
    """x · weightᵀ in the dtype of x (bf16 on a GPU), by 8-bit products forward and backward.

    `recipe`: one scale for a tensor, gradients in e5m2; or one for each row along the inner dim of each product,
    everything in e4m3. `fast`: which products may add up with a short accumulator. `casts`: who makes the 8-bit
    factors (the kernel only knows one scale for a tensor).
    """
    need_device("fp8_linear", x, weight)
    need(
        x.dtype in FLOATS and weight.dtype in FLOATS,
        "fp8_linear takes fp32, bf16 and fp16 and makes the 8-bit factors itself.",
    )
    if x.is_cuda:
        need(
            x.dtype == torch.bfloat16,
            "fp8_linear takes bf16 activations on a GPU; convert them, or run under autocast in bf16.",
        )
        need(
            torch.compiler.is_compiling() or torch.cuda.get_device_capability(x.device) >= CAPABILITY,
            "fp8_linear needs a GPU with 8-bit matmuls: compute capability 8.9 (Ada) or 9.0 (Hopper) and above.",
        )
    need(
        weight.dim() == 2 and x.shape[-1] == weight.shape[1],
        "fp8_linear needs a weight of [outputs, inputs].",
    )
    need(
        all(size % ALIGNMENT == 0 for size in (x.numel() // x.shape[-1], *weight.shape)),
        f"fp8_linear needs tokens, inputs and outputs in multiples of {ALIGNMENT}; pad them, or leave this layer out.",
    )
    need(recipe in ("tensorwise", "rowwise"), "fp8_linear knows the recipes tensorwise and rowwise.")
    need(
        casts == "compiler" or recipe == "tensorwise", "fp8_linear's casting kernel is for tensorwise scales."
    )
    x_mk = x.reshape(-1, x.shape[-1])
    options = (recipe == "rowwise", fast == "all", casts == "kernel")
    out_mn: Tensor = _Fp8Linear.apply(x_mk, weight, *options)  # type: ignore[no-untyped-call]
    return out_mn.reshape(*x.shape[:-1], weight.shape[0])


class _Fp8Linear(torch.autograd.Function):
    """Plain operators inside, so a compiler sees through it and fuses the casts."""

    @staticmethod
    def forward(ctx: Any, x_mk: Tensor, weight_nk: Tensor, rowwise: bool, fast: bool, kernel: bool) -> Tensor:
        weight = quantise(weight_nk, E4M3, rowwise)
        ctx.rowwise, ctx.fast, ctx.kernel, ctx.dtype = rowwise, fast, kernel, x_mk.dtype
        if rowwise:
            # The gradient of the weight wants columns scaled: other casts, from the wide values.
            x = quantise(x_mk, E4M3, rowwise)
            ctx.save_for_backward(x_mk, weight_nk)
        elif kernel:
            x, x_turned = _both(x_mk, E4M3)
            ctx.save_for_backward(x_turned.values, x.unit, weight_nk, weight.unit)
        else:
            x = quantise(x_mk, E4M3, rowwise)
            ctx.save_for_backward(x.values, x.unit, weight_nk, weight.unit)
        return _product(x, weight, x_mk.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, dout_mn: Tensor) -> tuple[Any, ...]:
        if ctx.rowwise:
            x_mk, weight_nk = ctx.saved_tensors
            dout, dout_turned = quantise(dout_mn, E4M3, True), _turned(dout_mn, E4M3)
            weight_turned, x_turned = _turned(weight_nk, E4M3), _turned(x_mk, E4M3)
        else:
            x_values, x_unit, weight_nk, weight_unit = ctx.saved_tensors
            # The scale is a power of two, so this is exactly the cast of the forward pass, turned over.
            weight_values = (weight_nk.t().float() * weight_unit.reciprocal()).to(E4M3).contiguous()
            weight_turned = Scaled(weight_values, weight_unit)
            if ctx.kernel:
                dout, dout_turned = _both(dout_mn, E5M2)
                x_turned = Scaled(x_values, x_unit)
            else:
                dout = quantise(dout_mn, E5M2, False)
                dout_turned = Scaled(dout.values.t().contiguous(), dout.unit)
                x_turned = Scaled(x_values.t().contiguous(), x_unit)
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = _product(dout, weight_turned, ctx.dtype, ctx.fast)
        if ctx.needs_input_grad[1]:
            dweight = _product(dout_turned, x_turned, ctx.dtype, ctx.fast).to(weight_nk.dtype)
        return dx, dweight, None, None, None


def _turned(x: Tensor, dtype: torch.dtype) -> Scaled:
    """The transpose with a scale for each of its rows, laid out as one."""
    values, unit = quantise(x.t(), dtype, rowwise=True)
    return Scaled(values.contiguous(), unit.contiguous())


def _both(x: Tensor, dtype: torch.dtype) -> tuple[Scaled, Scaled]:
    """The cast and its transpose by the kernel, with one scale."""
    scale = scale_for(largest_of(x), dtype)
    values, turned = _cast_both(x, scale, dtype)
    return Scaled(values, scale.reciprocal()), Scaled(turned, scale.reciprocal())


def _product(left: Scaled, right: Scaled, dtype: torch.dtype, fast: bool) -> Tensor:
    """left · rightᵀ; both have the inner dim side by side."""
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


@op("fp8_emulated_product")
def _emulated_product(
    left: Tensor, left_unit: Tensor, right: Tensor, right_unit: Tensor, dtype: torch.dtype
) -> Tensor:
    with torch.autocast(left.device.type, enabled=False):
        return reference.product(Scaled(left, left_unit), Scaled(right, right_unit), dtype)


@_emulated_product.register_fake
def _(left: Tensor, left_unit: Tensor, right: Tensor, right_unit: Tensor, dtype: torch.dtype) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[0], dtype=dtype)


@op("fp8_cast_both")
def _cast_both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return kernels.cast_both(x, scale, dtype)


@_cast_both.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    return x.new_empty(rows, columns, dtype=dtype), x.new_empty(columns, rows, dtype=dtype)
