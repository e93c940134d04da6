# mypy: allow-untyped-decorators, allow-untyped-calls
"""The squared ReLU in Triton, the baseline of `squared_relu.cu` (`rush bench kernels cuda_example`).

The same traffic in a quarter of the lines: Triton chooses how many bytes a thread loads, and needs neither a build nor
an operator's schema. That is why nearly all kernels here are in Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, NUM_WARPS = 2048, 8


@triton.jit
def squared_relu_kernel(x_ptr: tl.tensor, out_ptr: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    # A comparison, not a maximum, which would turn NaN into zero.
    x = tl.where(x < 0, 0.0, x)
    tl.store(out_ptr + place, (x * x).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def squared_relu_backward_kernel(
    dout_ptr: tl.tensor, x_ptr: tl.tensor, dx_ptr: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    dout = tl.load(dout_ptr + place, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    slope = tl.where(x < 0, 0.0, 2.0 * x)
    tl.store(dx_ptr + place, (dout * slope).to(dx_ptr.dtype.element_ty), mask=inside)


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        out = torch.empty_like(x)
        if size := x.numel():
            grid: Any = (triton.cdiv(size, BLOCK),)
            squared_relu_kernel[grid](x, out, size, BLOCK=BLOCK, num_warps=NUM_WARPS)
        return out

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> Tensor:
        (x,), dout = ctx.saved_tensors, above[0].contiguous()
        dx = torch.empty_like(x)
        if size := x.numel():
            grid: Any = (triton.cdiv(size, BLOCK),)
            squared_relu_backward_kernel[grid](dout, x, dx, size, BLOCK=BLOCK, num_warps=NUM_WARPS)
        return dx


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)², differentiable, for fp32, bf16 and fp16 on a CUDA device."""
    out: Tensor = _SquaredReLU.apply(x)
    return out
