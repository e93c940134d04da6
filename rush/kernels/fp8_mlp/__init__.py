# mypy: allow-untyped-decorators
"""Llama's MLP as one function with fp8 matmuls: gate and up, SwiGLU, down; forward and all gradients.

With separate layers, the activations between them are written in 16 bits, read for their amax, and read again to be
cast. Here the SwiGLU kernels write fp8 directly, in the layouts the matmuls need; in 16 bits there are only the matmuls'
own results: gate|up (saved) and its gradient (not saved). One power-of-two scale per tensor, as in `fp8_linear`; for
the gradients of gate and up the scale comes from a bound on their amax, so they are not computed twice.

Saved activations: the input in fp8, gate|up as the first matmul wrote it, a 256th of that for the bound; and the
weights. Input, output and upstream gradient are cast by plain operators for torch.compile to fuse, or by a kernel
(`casts`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from rush.kernels.fp8_linear import require_operands
from rush.kernels.fp8_linear.operands import (
    cast_transpose,
    cast_transpose_triton,
    scaled_mm,
    transposed,
    transposed_weight,
)
from rush.kernels.fp8_linear.reference import E4M3, E5M2, Fp8Tensor, quantize, scale_for
from rush.kernels.fp8_mlp import triton as kernels
from rush.kernels.support import op, require

__all__ = ["fp8_mlp"]

# Shapes: m tokens, d hidden, i width of the MLP, j = 2i (gate and up concatenated).


def fp8_mlp(
    x: Tensor,
    weight_jd: Tensor,
    down_di: Tensor,
    *,
    fast_accum: Literal["forward", "all"] = "forward",
    casts: Literal["compiler", "kernel"] = "compiler",
) -> Tensor:
    """(silu(gate) · up) · downᵀ in the dtype of x (bf16 on a GPU), where gate|up = x · weightᵀ.

    The weight holds the rows of gate, then those of up. `fast_accum` and `casts` as in `fp8_linear`.
    """
    require_operands("fp8_mlp", x, weight_jd, down_di)
    require(
        weight_jd.shape[0] == 2 * down_di.shape[1] and down_di.shape[0] == x.shape[-1],
        "fp8_mlp needs the concatenated weight of gate and up [2 × width, hidden], and down's [hidden, width].",
    )
    options = fast_accum == "all", casts == "kernel"
    out_md: Tensor = _Fp8MLP.apply(x.reshape(-1, x.shape[-1]), weight_jd, down_di, *options)  # type: ignore[no-untyped-call]
    return out_md.reshape(x.shape)


class _Fp8MLP(torch.autograd.Function):
    """Plain and custom operators: torch.compile traces through it, fuses the outer casts and calls the kernels."""

    @staticmethod
    def forward(
        ctx: Any, x_md: Tensor, weight_jd: Tensor, down_di: Tensor, fast_accum: bool, kernel: bool
    ) -> Tensor:
        dtype = x_md.dtype
        weight, down = (quantize(operand, E4M3, rowwise=False) for operand in (weight_jd, down_di))
        if kernel:
            x, saved = cast_transpose_triton(x_md, E4M3)
        else:
            x = saved = quantize(x_md, E4M3, rowwise=False)
        gate_up_mj = scaled_mm(x, weight, dtype, fast_accum=True)
        amax, max_derivative_ms = _amax(gate_up_mj)
        scale = scale_for(amax, E4M3)
        h = Fp8Tensor(_forward(gate_up_mj, scale), scale.reciprocal())
        ctx.save_for_backward(
            saved.values,
            x.inv_scale,
            gate_up_mj,
            scale,
            max_derivative_ms,
            weight_jd,
            weight.inv_scale,
            down_di,
            down.inv_scale,
        )
        ctx.fast_accum, ctx.kernel, ctx.dtype = fast_accum, kernel, dtype
        return scaled_mm(h, down, dtype, fast_accum=True)

    @staticmethod
    def backward(ctx: Any, dout_md: Tensor) -> tuple[Any, ...]:
        x_values, x_inv_scale, gate_up_mj, h_scale, max_derivative_ms, *weights = ctx.saved_tensors
        weight_jd, weight_inv_scale, down_di, down_inv_scale = weights
        dtype, fast_accum = ctx.dtype, ctx.fast_accum
        dout, dout_transposed = (cast_transpose_triton if ctx.kernel else cast_transpose)(dout_md, E5M2)
        dh_mi = scaled_mm(dout, transposed_weight(down_di, down_inv_scale), dtype, fast_accum)
        scale = scale_for(_bound(dh_mi, max_derivative_ms), E5M2)
        values, values_transposed, h_transposed = _backward(dh_mi, gate_up_mj, scale, h_scale)
        inv_scale = scale.reciprocal()
        dx = dweight = ddown = None
        if ctx.needs_input_grad[0]:
            dx = scaled_mm(
                Fp8Tensor(values, inv_scale),
                transposed_weight(weight_jd, weight_inv_scale),
                dtype,
                fast_accum,
            )
        if ctx.needs_input_grad[1]:
            x = Fp8Tensor(x_values, x_inv_scale) if ctx.kernel else transposed(x_values, x_inv_scale)
            dweight = scaled_mm(Fp8Tensor(values_transposed, inv_scale), x, dtype, fast_accum).to(
                weight_jd.dtype
            )
        if ctx.needs_input_grad[2]:
            h = Fp8Tensor(h_transposed, h_scale.reciprocal())
            ddown = scaled_mm(dout_transposed, h, dtype, fast_accum).to(down_di.dtype)
        return dx, dweight, ddown, None, None


@op("fp8_swiglu_amax")
def _amax(gate_up_mj: Tensor) -> tuple[Tensor, Tensor]:
    return kernels.amax(gate_up_mj)


@_amax.register_fake
def _(gate_up_mj: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, segments = gate_up_mj.shape[0], kernels.segments(gate_up_mj.shape[1] // 2)
    max_derivative_ms = gate_up_mj.new_empty(num_rows, segments, dtype=torch.float32)
    return gate_up_mj.new_empty((), dtype=torch.float32), max_derivative_ms


@op("fp8_swiglu")
def _forward(gate_up_mj: Tensor, scale: Tensor) -> Tensor:
    return kernels.forward(gate_up_mj, scale)


@_forward.register_fake
def _(gate_up_mj: Tensor, scale: Tensor) -> Tensor:
    return gate_up_mj.new_empty(gate_up_mj.shape[0], gate_up_mj.shape[1] // 2, dtype=E4M3)


@op("fp8_swiglu_bound")
def _bound(dh_mi: Tensor, max_derivative_ms: Tensor) -> Tensor:
    return kernels.bound(dh_mi, max_derivative_ms)


@_bound.register_fake
def _(dh_mi: Tensor, max_derivative_ms: Tensor) -> Tensor:
    return dh_mi.new_empty((), dtype=torch.float32)


@op("fp8_swiglu_backward")
def _backward(
    dh_mi: Tensor, gate_up_mj: Tensor, scale: Tensor, h_scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return kernels.backward(dh_mi, gate_up_mj, scale, h_scale)


@_backward.register_fake
def _(dh_mi: Tensor, gate_up_mj: Tensor, scale: Tensor, h_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, width = dh_mi.shape
    out_mj = dh_mi.new_empty(num_rows, 2 * width, dtype=E5M2)
    transposed_jm = dh_mi.new_empty(2 * width, num_rows, dtype=E5M2)
    return out_mj, transposed_jm, dh_mi.new_empty(width, num_rows, dtype=E4M3)
