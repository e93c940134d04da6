# mypy: allow-untyped-decorators
"""GELU in its tanh form, as one kernel forward and one backward.

Since (1 + tanh(z)) / 2 = sigmoid(2z), the function is x · sigmoid(u) with
u = 2 √(2/π) (x + 0.044715 x³): one exponential, and no cancellation where tanh is near −1. Its slope is
sigmoid(u) · (1 + x · sigmoid(−u) · du/dx). Torch's own GELU is one kernel too, so alone this
gains little; what a kernel of our own gives is a place to fuse more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Elements of a program: with 8 warps each thread moves two vectors of 16 bytes in bf16."""
NUM_WARPS = 8

TWICE_ROOT_2_PI = tl.constexpr(1.5957691216057308)  # 2 √(2/π)
CUBIC = tl.constexpr(0.044715)


@triton.jit
def gelu_forward_kernel(x_ptr: tl.tensor, out_ptr: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    u = x * (1.0 + x * x * CUBIC) * TWICE_ROOT_2_PI
    tl.store(out_ptr + place, (x * tl.sigmoid(u)).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gelu_slope(x: tl.tensor) -> tl.tensor:
    u = x * (1.0 + x * x * CUBIC) * TWICE_ROOT_2_PI
    du = (1.0 + 3.0 * (x * x * CUBIC)) * TWICE_ROOT_2_PI
    # 1 − sigmoid(u) is sigmoid(−u), and so nothing cancels where u is large.
    return tl.sigmoid(u) * (1.0 + x * tl.sigmoid(-u) * du)


@triton.jit
def gelu_backward_kernel(
    dout_ptr: tl.tensor, x_ptr: tl.tensor, dx_ptr: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    dout = tl.load(dout_ptr + place, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx_ptr + place, (dout * gelu_slope(x)).to(dx_ptr.dtype.element_ty), mask=inside)


def forward(x: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    if size := x.numel():
        gelu_forward_kernel[(triton.cdiv(size, BLOCK),)](x, out, size, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out


def backward(dout: Tensor, x: Tensor) -> Tensor:
    dout, x = dout.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    if size := x.numel():
        grid = (triton.cdiv(size, BLOCK),)
        gelu_backward_kernel[grid](dout, x, dx, size, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return dx
