"""Linear layers whose three matmuls (forward, and both gradients) have fp8 operands.

fp8 tensor cores run at twice the bf16 rate. The cost is precision, and the casts: the amax of every operand is computed
each time (dynamic scaling) and the operand is rounded. Weights, activations and gradients outside keep their dtype.

The matmul is `torch._scaled_mm` (cuBLAS or CUTLASS), which on Hopper needs both operands contiguous along the inner
dim. So transposed operands are cast directly into the transposed layout. The casts are plain operators by default, for
torch.compile to fuse with their neighbors; in eager mode they launch a dozen small kernels. `casts="kernel"` produces
both layouts in one Triton kernel instead.

On a CPU with TRITON_INTERPRET=1 the matmuls are emulated (operator `rush::fp8_emulated_matmul`), for tests.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from rush.kernels.fp8_linear.operands import (
    cast_transpose,
    cast_transpose_triton,
    scaled_mm,
    transposed,
    transposed_weight,
)
from rush.kernels.fp8_linear.reference import E4M3, E5M2, Fp8Tensor, quantize
from rush.kernels.support import FLOATS, require, require_device

__all__ = ["ALIGNMENT", "fp8_linear", "require_fp8_gpu", "require_operands"]

ALIGNMENT = 16
"""Rows of an operand must be a multiple of this many bytes."""
CAPABILITY = (8, 9)

# Shapes: m tokens, n outputs, k inputs.


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    *,
    recipe: Literal["tensorwise", "rowwise"] = "tensorwise",
    fast_accum: Literal["forward", "all"] = "forward",
    casts: Literal["compiler", "kernel"] = "compiler",
) -> Tensor:
    """x · weightᵀ in the dtype of x (bf16 on a GPU), with fp8 matmuls forward and backward.

    `recipe`: one scale per tensor, gradients in e5m2; or one per row along the inner dim of each matmul, everything in
    e4m3. `fast_accum`: which matmuls use fast accumulation. `casts`: by torch.compile or by a Triton kernel (tensorwise
    scales only).
    """
    require_operands("fp8_linear", x, weight)
    require(recipe in ("tensorwise", "rowwise"), "fp8_linear has the recipes tensorwise and rowwise.")
    require(
        casts == "compiler" or recipe == "tensorwise", "fp8_linear's cast kernel needs tensorwise scales."
    )
    x_mk = x.reshape(-1, x.shape[-1])
    options = (recipe == "rowwise", fast_accum == "all", casts == "kernel", weight.requires_grad)
    out_mn: Tensor = _Fp8Linear.apply(x_mk, weight, *options)  # type: ignore[no-untyped-call]
    return out_mn.reshape(*x.shape[:-1], weight.shape[0])


def require_fp8_gpu(name: str, x: Tensor) -> None:
    """Refuse a GPU without fp8 matmuls."""
    require(
        not x.is_cuda
        or torch.compiler.is_compiling()
        or torch.cuda.get_device_capability(x.device) >= CAPABILITY,
        f"{name} needs a GPU with fp8 matmuls: compute capability 8.9 (Ada) or 9.0 (Hopper) and above.",
    )


def require_operands(name: str, x: Tensor, *weights: Tensor) -> None:
    """Check the operands of fp8 matmuls: an input and weights [outputs, inputs], of which it enters the first."""
    require_device(name, x, *weights)
    require(
        x.dtype in FLOATS and all(weight.dtype in FLOATS for weight in weights),
        f"{name} takes fp32, bf16 and fp16 and casts to fp8 itself.",
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
    """Plain operators inside, so torch.compile fuses the casts."""

    @staticmethod
    def forward(
        ctx: Any,
        x_mk: Tensor,
        weight_nk: Tensor,
        rowwise: bool,
        fast_accum: bool,
        kernel: bool,
        trained: bool,
    ) -> Tensor:
        ctx.rowwise, ctx.fast_accum, ctx.kernel, ctx.dtype = rowwise, fast_accum, kernel, x_mk.dtype
        weight = quantize(weight_nk, E4M3, rowwise)
        if kernel:
            x, saved = cast_transpose_triton(x_mk, E4M3)
        else:
            x = saved = quantize(x_mk, E4M3, rowwise)
        # Only a weight's gradient needs the input. With scales per row it needs columnwise scales: other casts, from the
        # unquantized values.
        values = (x_mk if rowwise else saved.values) if trained else None
        ctx.save_for_backward(
            values, None if rowwise else x.inv_scale, weight_nk, None if rowwise else weight.inv_scale
        )
        return scaled_mm(x, weight, x_mk.dtype, fast_accum=True)

    @staticmethod
    def backward(ctx: Any, dout_mn: Tensor) -> tuple[Any, ...]:
        x_saved, x_inv_scale, weight_nk, weight_inv_scale = ctx.saved_tensors
        with_x, with_weight = ctx.needs_input_grad[:2]
        dx = dweight = None
        if ctx.rowwise:
            if with_x:
                dx = scaled_mm(
                    quantize(dout_mn, E4M3, True), _columns(weight_nk, E4M3), ctx.dtype, ctx.fast_accum
                )
            if with_weight:
                dout_transposed, x_transposed = _columns(dout_mn, E4M3), _columns(x_saved, E4M3)
                dweight = scaled_mm(dout_transposed, x_transposed, ctx.dtype, ctx.fast_accum)
        else:
            dout, dout_transposed = (cast_transpose_triton if ctx.kernel else cast_transpose)(dout_mn, E5M2)
            if with_x:
                weight_transposed = transposed_weight(weight_nk, weight_inv_scale)
                dx = scaled_mm(dout, weight_transposed, ctx.dtype, ctx.fast_accum)
            if with_weight:
                x_transposed = (Fp8Tensor if ctx.kernel else transposed)(x_saved, x_inv_scale)
                dweight = scaled_mm(dout_transposed, x_transposed, ctx.dtype, ctx.fast_accum)
        dweight = dweight if dweight is None else dweight.to(weight_nk.dtype)
        return dx, dweight, None, None, None, None


def _columns(x: Tensor, dtype: torch.dtype) -> Fp8Tensor:
    """The transpose, quantized with a scale per row, contiguous."""
    values, inv_scale = quantize(x.t(), dtype, rowwise=True)
    return Fp8Tensor(values.contiguous(), inv_scale.contiguous())
