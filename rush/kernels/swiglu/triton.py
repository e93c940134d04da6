# mypy: allow-untyped-decorators
"""SwiGLU, silu(gate) · up, as one kernel forward and one backward.

Plain torch writes silu(gate), reads it again to multiply, and keeps it for the backward pass: three
tensors as wide as the MLP. Here the product is made in registers: two reads, one write. Nothing but gate
and up is kept; the backward pass makes the sigmoid again, which costs less than fetching it would, and
writes both gradients in one go: three reads, two writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rush.kernels.fast_math import LOG2_E, exp2, reciprocal

BLOCK = 2048
"""Elements of a program: with 8 warps each thread moves one vector of 16 bytes of every tensor in bf16."""
NUM_WARPS = 8


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    # Where the power is infinite this is zero, as it should be.
    return reciprocal(1.0 + exp2(-x * LOG2_E))


@triton.jit
def swiglu_forward_kernel(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    # One step of 64 bits to the block; inside it 32 bits are enough.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    place = tl.arange(0, BLOCK)
    inside = place < size - start
    gate = tl.load(gate_ptr + start + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + start + place, mask=inside, other=0.0).to(tl.float32)
    out = gate * sigmoid(gate) * up
    tl.store(out_ptr + start + place, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward_kernel(
    dout_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    dgate_ptr: tl.tensor,
    dup_ptr: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    start = tl.program_id(0).to(tl.int64) * BLOCK
    place = tl.arange(0, BLOCK)
    inside = place < size - start
    dout = tl.load(dout_ptr + start + place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + start + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + start + place, mask=inside, other=0.0).to(tl.float32)
    share = sigmoid(gate)
    silu = gate * share
    dgate = dout * up * (share + silu * (1.0 - share))
    tl.store(dgate_ptr + start + place, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + start + place, (dout * silu).to(dup_ptr.dtype.element_ty), mask=inside)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    out = torch.empty_like(gate)
    if size := gate.numel():
        grid = (triton.cdiv(size, BLOCK),)
        swiglu_forward_kernel[grid](gate, up, out, size, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return out


def backward(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dout, gate, up = dout.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    if size := gate.numel():
        grid = (triton.cdiv(size, BLOCK),)
        swiglu_backward_kernel[grid](dout, gate, up, dgate, dup, size, BLOCK=BLOCK, num_warps=NUM_WARPS)
    return dgate, dup
