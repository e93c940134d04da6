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

BLOCK = 4096
"""Elements of a program: with 8 warps each thread moves two vectors of 16 bytes of every tensor in bf16."""
NUM_WARPS = 8


@triton.jit
def swiglu_forward_kernel(
    gate_ptr: tl.tensor, up_ptr: tl.tensor, out_ptr: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    gate = tl.load(gate_ptr + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + place, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=inside)


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
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    dout = tl.load(dout_ptr + place, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + place, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    dgate = dout * up * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(dgate_ptr + place, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + place, (dout * silu).to(dup_ptr.dtype.element_ty), mask=inside)


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
