"""Linear layers whose three matrix products (forward, and both gradients) have 8-bit factors.

The units for 8-bit floats do twice the work of those for 16 bits. What it costs is precision, and the
casts: the largest magnitude of every factor is found anew each time (dynamic scaling) and the factor is
rounded. Weights, activations and gradients outside stay as they are; the casts are made on the way in.

The matmul itself is torch's (`torch._scaled_mm`: cuBLAS or CUTLASS), which on Hopper wants both factors with
the inner dim side by side. So transposed factors are cast straight into the transposed layout. The casts
are plain operators by default, for a compiler to fuse with what stands before and after: use this under
torch.compile, where it shines; eager it launches a dozen small kernels. `casts="kernel"` makes both layouts
of a factor in one Triton kernel instead.

On a CPU with TRITON_INTERPRET=1 the products are emulated (operator `rush::fp8_emulated_matmul`), for tests.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from rush.kernels.fp8_linear.operands import cast, cast_by_kernel, product, turned, turned_weight
from rush.kernels.fp8_linear.reference import E4M3, E5M2, Scaled, quantize
from rush.kernels.support import require, require_device

__all__ = ["ALIGNMENT", "fp8_linear", "require_fp8_gpu", "require_operands"]

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
    require_operands("fp8_linear", x, weight)
    require(recipe in ("tensorwise", "rowwise"), "fp8_linear knows the recipes tensorwise and rowwise.")
    require(
        casts == "compiler" or recipe == "tensorwise", "fp8_linear's casting kernel is for tensorwise scales."
    )
    x_mk = x.reshape(-1, x.shape[-1])
    options = (recipe == "rowwise", fast == "all", casts == "kernel")
    out_mn: Tensor = _Fp8Linear.apply(x_mk, weight, *options)  # type: ignore[no-untyped-call]
    return out_mn.reshape(*x.shape[:-1], weight.shape[0])


def require_fp8_gpu(name: str, x: Tensor) -> None:
    """Refuse a GPU without 8-bit matmuls."""
    require(
        not x.is_cuda
        or torch.compiler.is_compiling()
        or torch.cuda.get_device_capability(x.device) >= CAPABILITY,
        f"{name} needs a GPU with 8-bit matmuls: compute capability 8.9 (Ada) or 9.0 (Hopper) and above.",
    )


def require_operands(name: str, x: Tensor, *weights: Tensor) -> None:
    """Refuse what 8-bit products cannot be made of: an input of the first of these weights [outputs, inputs]."""
    require_device(name, x, *weights)
    require(
        x.dtype in FLOATS and all(weight.dtype in FLOATS for weight in weights),
        f"{name} takes fp32, bf16 and fp16 and makes the 8-bit factors itself.",
    )
    if x.is_cuda:
        require(
            x.dtype == torch.bfloat16,
            f"{name} takes bf16 activations on a GPU; convert them, or run under autocast in bf16.",
        )
        require_fp8_gpu(name, x)
    require(
        all(weight.dim() == 2 for weight in weights) and x.shape[-1] == weights[0].shape[1],
        f"{name} needs a weight of [outputs, inputs].",
    )
    sizes = [x.numel() // x.shape[-1], *(size for weight in weights for size in weight.shape)]
    require(
        all(size % ALIGNMENT == 0 for size in sizes),
        f"{name} needs tokens, inputs and outputs in multiples of {ALIGNMENT}; pad them, or leave this layer out.",
    )


class _Fp8Linear(torch.autograd.Function):
    """Plain operators inside, so a compiler sees through it and fuses the casts."""

    @staticmethod
    def forward(ctx: Any, x_mk: Tensor, weight_nk: Tensor, rowwise: bool, fast: bool, kernel: bool) -> Tensor:
        weight = quantize(weight_nk, E4M3, rowwise)
        ctx.rowwise, ctx.fast, ctx.kernel, ctx.dtype = rowwise, fast, kernel, x_mk.dtype
        if rowwise:
            # The gradient of the weight wants columns scaled: other casts, from the wide values.
            x = quantize(x_mk, E4M3, rowwise)
            ctx.save_for_backward(x_mk, weight_nk)
        elif kernel:
            x, x_turned = cast_by_kernel(x_mk, E4M3)
            ctx.save_for_backward(x_turned.values, x.unit, weight_nk, weight.unit)
        else:
            x = quantize(x_mk, E4M3, rowwise)
            ctx.save_for_backward(x.values, x.unit, weight_nk, weight.unit)
        return product(x, weight, x_mk.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, dout_mn: Tensor) -> tuple[Any, ...]:
        if ctx.rowwise:
            x_mk, weight_nk = ctx.saved_tensors
            dout, dout_turned = quantize(dout_mn, E4M3, True), _columns(dout_mn, E4M3)
            weight_turned, x_turned = _columns(weight_nk, E4M3), _columns(x_mk, E4M3)
        else:
            x_values, x_unit, weight_nk, weight_unit = ctx.saved_tensors
            weight_turned = turned_weight(weight_nk, weight_unit)
            dout, dout_turned = (cast_by_kernel if ctx.kernel else cast)(dout_mn, E5M2)
            x_turned = Scaled(x_values, x_unit) if ctx.kernel else turned(x_values, x_unit)
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = product(dout, weight_turned, ctx.dtype, ctx.fast)
        if ctx.needs_input_grad[1]:
            dweight = product(dout_turned, x_turned, ctx.dtype, ctx.fast).to(weight_nk.dtype)
        return dx, dweight, None, None, None


def _columns(x: Tensor, dtype: torch.dtype) -> Scaled:
    """The transpose with a scale for each of its rows, laid out as one."""
    values, unit = quantize(x.t(), dtype, rowwise=True)
    return Scaled(values.contiguous(), unit.contiguous())
