# mypy: allow-untyped-decorators
"""GeGLU, gelu(gate) · up, as one kernel forward and one backward: the traffic of SwiGLU, the arithmetic of GELU.

As in `swiglu/triton.py` the product stays in registers and only gate and up are saved. GELU and its derivative share one
sigmoid, so the backward pass has one exponential too (`gelu/triton.py` has the formula).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rush.kernels.elementwise import launch
from rush.kernels.fast_math import exp2, reciprocal
from rush.kernels.gelu.triton import DERIVATIVE_1, DERIVATIVE_3, EXPONENT_1, EXPONENT_3

BLOCK = 2048
"""Elements per program: with 8 warps each thread moves one 16-byte vector of every tensor in bf16."""
NUM_WARPS = 8


@triton.jit
def geglu_forward_kernel(
    gate_ptr: tl.tensor, up_ptr: tl.tensor, out_ptr: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    # A 64-bit offset to the block, 32-bit offsets inside.
    start = tl.program_id(0).to(tl.int64) * BLOCK
    place = tl.arange(0, BLOCK)
    inside = place < size - start
    gate = tl.load(gate_ptr + start + place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + start + place, mask=inside, other=0.0).to(tl.float32)
    sigmoid = reciprocal(1.0 + exp2(gate * tl.fma(gate * gate, EXPONENT_3, EXPONENT_1)))
    tl.store(out_ptr + start + place, (gate * sigmoid * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def geglu_backward_kernel(
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
    square = gate * gate
    # Clamped so that infinity is never multiplied by a sigmoid of zero.
    power = exp2(tl.minimum(gate * tl.fma(square, EXPONENT_3, EXPONENT_1), 126.0))
    sigmoid = reciprocal(1.0 + power)
    # 1 − sigmoid, without the cancellation where it is small.
    rest = power * sigmoid
    derivative = tl.fma(sigmoid * rest, gate * tl.fma(square, DERIVATIVE_3, DERIVATIVE_1), sigmoid)
    tl.store(dgate_ptr + start + place, (dout * up * derivative).to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + start + place, (dout * gate * sigmoid).to(dup_ptr.dtype.element_ty), mask=inside)


def forward(gate: Tensor, up: Tensor) -> Tensor:
    return launch(geglu_forward_kernel, (gate, up), 1, BLOCK, NUM_WARPS)[0]


def backward(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    dgate, dup = launch(geglu_backward_kernel, (dout, gate, up), 2, BLOCK, NUM_WARPS)
    return dgate, dup
