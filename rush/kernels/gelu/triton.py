# mypy: allow-untyped-decorators
"""GELU (tanh approximation), as one kernel forward and one backward.

Since (1 + tanh(z)) / 2 = sigmoid(2z), the function is x · sigmoid(u) with u = 2 √(2/π) (x + 0.044715 x³): one
exponential, and no cancellation where tanh is near −1. Its derivative is s + s · (1 − s) · x · du/dx with s = sigmoid(u).
With log2(e) folded into the coefficients that is one exp2, one reciprocal and a few multiplications, hidden behind
memory latency. torch's GELU is one kernel too, so alone this gains little; it is a place to fuse more.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from rush.kernels.elementwise import launch
from rush.kernels.fast_math import exp2, reciprocal

BLOCK = 2048
"""Elements per program: with 8 warps each thread moves one 16-byte vector in bf16."""
NUM_WARPS = 8

_LINEAR, _CUBIC = 2 * math.sqrt(2 / math.pi), 0.044715
# −log2(e) · u is x · (EXPONENT_1 + EXPONENT_3 · x²), and x · du/dx is x · (DERIVATIVE_1 + DERIVATIVE_3 · x²).
EXPONENT_1, EXPONENT_3 = tl.constexpr(-_LINEAR / math.log(2)), tl.constexpr(-_LINEAR / math.log(2) * _CUBIC)
DERIVATIVE_1, DERIVATIVE_3 = tl.constexpr(_LINEAR), tl.constexpr(_LINEAR * 3 * _CUBIC)


@triton.jit
def gelu_forward_kernel(x_ptr: tl.tensor, out_ptr: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    sigmoid = reciprocal(1.0 + exp2(x * tl.fma(x * x, EXPONENT_3, EXPONENT_1)))
    tl.store(out_ptr + place, (x * sigmoid).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gelu_derivative(x: tl.tensor) -> tl.tensor:
    square = x * x
    # Clamped so that infinity is never multiplied by a sigmoid of zero.
    power = exp2(tl.minimum(x * tl.fma(square, EXPONENT_3, EXPONENT_1), 126.0))
    sigmoid = reciprocal(1.0 + power)
    # 1 − sigmoid, without the cancellation where it is small.
    rest = power * sigmoid
    return tl.fma(sigmoid * rest, x * tl.fma(square, DERIVATIVE_3, DERIVATIVE_1), sigmoid)


@triton.jit
def gelu_backward_kernel(
    dout_ptr: tl.tensor, x_ptr: tl.tensor, dx_ptr: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr
) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    dout = tl.load(dout_ptr + place, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(dx_ptr + place, (dout * gelu_derivative(x)).to(dx_ptr.dtype.element_ty), mask=inside)


def forward(x: Tensor) -> Tensor:
    return launch(gelu_forward_kernel, (x,), 1, BLOCK, NUM_WARPS)[0]


def backward(dout: Tensor, x: Tensor) -> Tensor:
    return launch(gelu_backward_kernel, (dout, x), 1, BLOCK, NUM_WARPS)[0]
