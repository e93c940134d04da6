# mypy: allow-untyped-decorators
"""Llama's MLP as one function with 8-bit products: gate and up, SwiGLU, down; forward and all gradients.

Where each layer stands alone, what lies between them is written in 16 bits, read to find its largest magnitude,
and read again to be cast. Here the kernels of SwiGLU write 8 bits straight away, in the layouts the products want, and
nothing between the products exists in 16 bits but their own results: gate|up (kept) and the gradient of their product
(not kept). One scale for a tensor, a power of two, as in `fp8_linear`; for the gradients of gate and up from a bound
of their largest magnitude, so that they need not be made to be measured.

Kept for the backward pass: the input in 8 bits, gate|up as the first product gave it, a 256th of that for the bound,
the weights. Input, output and gradient from above are cast by plain operators for a compiler to fuse, or by a kernel
(`casts`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from rush.kernels.fp8_linear import require_operands
from rush.kernels.fp8_linear.operands import cast, cast_by_kernel, product, turned, turned_weight
from rush.kernels.fp8_linear.reference import E4M3, E5M2, Scaled, quantize, scale_for
from rush.kernels.fp8_mlp import triton as kernels
from rush.kernels.support import op, require

__all__ = ["fp8_mlp"]

# Shapes: m tokens, d hidden, i width of the MLP, j its double (gate and up side by side).


def fp8_mlp(
    x: Tensor,
    weight_jd: Tensor,
    down_di: Tensor,
    *,
    fast: Literal["forward", "all"] = "forward",
    casts: Literal["compiler", "kernel"] = "compiler",
) -> Tensor:
    """(silu(gate) · up) · downᵀ in the dtype of x (bf16 on a GPU), where gate|up = x · weightᵀ.

    The weight holds the rows of gate, then those of up. `fast` and `casts` as in `fp8_linear`.
    """
    require_operands("fp8_mlp", x, weight_jd, down_di)
    require(
        weight_jd.shape[0] == 2 * down_di.shape[1] and down_di.shape[0] == x.shape[-1],
        "fp8_mlp needs the weights of gate and up one below another [2 × width, hidden], and down's [hidden, width].",
    )
    options = fast == "all", casts == "kernel"
    out_md: Tensor = _Fp8MLP.apply(x.reshape(-1, x.shape[-1]), weight_jd, down_di, *options)  # type: ignore[no-untyped-call]
    return out_md.reshape(x.shape)


class _Fp8MLP(torch.autograd.Function):
    """Plain operators and our own: a compiler sees through it, fuses the casts at its ends, and calls the kernels."""

    @staticmethod
    def forward(
        ctx: Any, x_md: Tensor, weight_jd: Tensor, down_di: Tensor, fast: bool, kernel: bool
    ) -> Tensor:
        dtype = x_md.dtype
        weight, down = (quantize(factor, E4M3, rowwise=False) for factor in (weight_jd, down_di))
        if kernel:
            x, kept = cast_by_kernel(x_md, E4M3)
        else:
            x = kept = quantize(x_md, E4M3, rowwise=False)
        joined_mj = product(x, weight, dtype, fast=True)
        largest, steepest_ms = _largest(joined_mj)
        scale = scale_for(largest, E4M3)
        h = Scaled(_forward(joined_mj, scale), scale.reciprocal())
        ctx.save_for_backward(
            kept.values, x.unit, joined_mj, scale, steepest_ms, weight_jd, weight.unit, down_di, down.unit
        )
        ctx.fast, ctx.kernel, ctx.dtype = fast, kernel, dtype
        return product(h, down, dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, dout_md: Tensor) -> tuple[Any, ...]:
        x_values, x_unit, joined_mj, h_scale, steepest_ms, *weights = ctx.saved_tensors
        weight_jd, weight_unit, down_di, down_unit = weights
        dtype, fast = ctx.dtype, ctx.fast
        dout, dout_turned = (cast_by_kernel if ctx.kernel else cast)(dout_md, E5M2)
        dh_mi = product(dout, turned_weight(down_di, down_unit), dtype, fast)
        scale = scale_for(_bound(dh_mi, steepest_ms), E5M2)
        values, values_turned, h_turned = _backward(dh_mi, joined_mj, scale, h_scale)
        unit = scale.reciprocal()
        dx = dweight = ddown = None
        if ctx.needs_input_grad[0]:
            dx = product(Scaled(values, unit), turned_weight(weight_jd, weight_unit), dtype, fast)
        if ctx.needs_input_grad[1]:
            x = Scaled(x_values, x_unit) if ctx.kernel else turned(x_values, x_unit)
            dweight = product(Scaled(values_turned, unit), x, dtype, fast).to(weight_jd.dtype)
        if ctx.needs_input_grad[2]:
            h = Scaled(h_turned, h_scale.reciprocal())
            ddown = product(dout_turned, h, dtype, fast).to(down_di.dtype)
        return dx, dweight, ddown, None, None


@op("fp8_swiglu_largest")
def _largest(joined_mj: Tensor) -> tuple[Tensor, Tensor]:
    return kernels.largest(joined_mj)


@_largest.register_fake
def _(joined_mj: Tensor) -> tuple[Tensor, Tensor]:
    num_rows, segments = joined_mj.shape[0], kernels.segments(joined_mj.shape[1] // 2)
    steepest_ms = joined_mj.new_empty(num_rows, segments, dtype=torch.float32)
    return joined_mj.new_empty((), dtype=torch.float32), steepest_ms


@op("fp8_swiglu")
def _forward(joined_mj: Tensor, scale: Tensor) -> Tensor:
    return kernels.forward(joined_mj, scale)


@_forward.register_fake
def _(joined_mj: Tensor, scale: Tensor) -> Tensor:
    return joined_mj.new_empty(joined_mj.shape[0], joined_mj.shape[1] // 2, dtype=E4M3)


@op("fp8_swiglu_bound")
def _bound(dh_mi: Tensor, steepest_ms: Tensor) -> Tensor:
    return kernels.bound(dh_mi, steepest_ms)


@_bound.register_fake
def _(dh_mi: Tensor, steepest_ms: Tensor) -> Tensor:
    return dh_mi.new_empty((), dtype=torch.float32)


@op("fp8_swiglu_backward")
def _backward(
    dh_mi: Tensor, joined_mj: Tensor, scale: Tensor, h_scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return kernels.backward(dh_mi, joined_mj, scale, h_scale)


@_backward.register_fake
def _(dh_mi: Tensor, joined_mj: Tensor, scale: Tensor, h_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, width = dh_mi.shape
    out_mj = dh_mi.new_empty(num_rows, 2 * width, dtype=E5M2)
    turned_jm = dh_mi.new_empty(2 * width, num_rows, dtype=E5M2)
    return out_mj, turned_jm, dh_mi.new_empty(width, num_rows, dtype=E4M3)
