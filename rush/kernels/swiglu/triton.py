# mypy: allow-untyped-decorators
"""SwiGLU, silu(gate) · up, as one kernel forward and one backward.

Plain torch writes silu(gate), reads it again to multiply, and saves it for the backward pass: three tensors as wide as
the MLP. Here the product stays in registers: two reads, one write. Only gate and up are saved; the backward pass
recomputes the sigmoid, which costs less than loading it, and writes both gradients: three reads, two writes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rush.kernels.elementwise import launch
from rush.kernels.fast_math import LOG2_E, exp2, reciprocal

BLOCK = 2048
"""Elements per program: with 8 warps each thread moves one 16-byte vector of every tensor in bf16."""
NUM_WARPS = 8


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    # Zero where the exponential overflows.
    return reciprocal(1.0 + exp2(-x * LOG2_E))


@triton.jit
def swiglu_forward_kernel(
    gate_ptr: tl.tensor, up_ptr: tl.tensor, out_ptr: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    # A 64-bit offset to the block, 32-bit offsets inside.
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
    s = sigmoid(gate)
    silu = gate * s
    dgate = dout * up * (s + silu * (1.0 - s))
    tl.store(dgate_ptr + start + place, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + start + place, (dout * silu).to(dup_ptr.dtype.element_ty), mask=inside)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    return launch(swiglu_forward_kernel, (gate, up), 1, BLOCK, NUM_WARPS)[0]


def backward(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = launch(swiglu_backward_kernel, (dout, gate, up), 2, BLOCK, NUM_WARPS)
    return dgate, dup
