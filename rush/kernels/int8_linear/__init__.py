"""Linear layers whose three matmuls (forward, and both gradients) have int8 operands.

int8 tensor cores run at twice the bf16 rate on an A100, at four times on GeForce cards. GPUs since Ampere have them, also
those without fp8. The cost is precision, and the casts: every operand is scaled row by row and rounded, to nearest in the
forward pass and for inputs and weights; the gradient of the output, whose small values would all become zero, is rounded
stochastically, by a hash of row, column and a seed that the caller gives.

The matmul is `torch._int_mm` (cuBLAS), which accumulates in int32, so it is exact. On a GPU it wants both operands
contiguous along the inner dim, so transposed operands are cast into the transposed layout. Casts and scaling are plain
operators, for torch.compile to fuse with their neighbors; in eager mode they launch a dozen small kernels each.

On a CPU the same code runs, slowly, for tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rush.kernels.int8_linear.reference import (
    LARGEST,
    Int8Tensor,
    columns,
    noises,
    quantize,
    random_bits,
)
from rush.kernels.support import FLOATS, require, require_device

__all__ = ["ALIGNMENT", "LEAST", "LONGEST", "int8_linear"]

ALIGNMENT = 16
"""Rows of an operand must be a multiple of this many bytes on a GPU."""
LEAST = 32
"""Rows of a matmul on a GPU: `_int_mm` wants more than 16."""
LONGEST = (2**31 - 1) // LARGEST**2
"""Terms of a sum that surely fits into int32."""
CAPABILITY = (8, 0)

# Shapes: m tokens, n outputs, k inputs.


def int8_linear(x: Tensor, weight: Tensor, seed: Tensor | None = None) -> Tensor:
    """x · weightᵀ in the dtype of x, with int8 matmuls forward and backward.

    `seed`: an int32 on the device, for rounding the gradient; by default drawn from torch's generator.
    """
    require_device("int8_linear", x, weight, has_cpu=True)
    require(
        x.dtype in FLOATS and weight.dtype in FLOATS,
        "int8_linear takes fp32, bf16 and fp16 and casts to int8 itself.",
    )
    require(
        weight.dim() == 2 and x.shape[-1] == weight.shape[1],
        "int8_linear needs a weight of [outputs, inputs].",
    )
    x_mk = x.reshape(-1, x.shape[-1])
    sizes = (*x_mk.shape, weight.shape[0])
    require(
        max(sizes) <= LONGEST,
        f"int8_linear sums up to {LONGEST:,} terms in int32; use fewer tokens in a pass, or leave this layer out.",
    )
    if x.is_cuda:
        _require_gpu(x, sizes)
    if seed is None:
        seed = torch.randint(2**31 - 1, (), dtype=torch.int32, device=x.device)
    out_mn: Tensor = _Int8Linear.apply(x_mk, weight, seed, weight.requires_grad)  # type: ignore[no-untyped-call]
    return out_mn.reshape(*x.shape[:-1], weight.shape[0])


def _require_gpu(x: Tensor, sizes: tuple[int, ...]) -> None:
    require(
        torch.compiler.is_compiling() or torch.cuda.get_device_capability(x.device) >= CAPABILITY,
        "int8_linear needs a GPU of compute capability 8.0 (Ampere) or above.",
    )
    require(
        all(size % ALIGNMENT == 0 and size >= LEAST for size in sizes),
        f"int8_linear needs tokens, inputs and outputs in multiples of {ALIGNMENT}, at least {LEAST}; pad them, or leave this "
        "layer out.",
    )


def scaled_mm(left: Int8Tensor, right: Int8Tensor, dtype: torch.dtype) -> Tensor:
    """left · rightᵀ; both are contiguous along the inner dim."""
    sums = torch._int_mm(left.values, right.values.t())
    return (sums.float() * left.inv_scale * right.inv_scale.t()).to(dtype)


class _Int8Linear(torch.autograd.Function):
    """Plain operators inside, so torch.compile fuses the casts. The gradients need other scales than the output: casts of
    their own, from the unquantized values."""

    @staticmethod
    def forward(ctx: Any, x_mk: Tensor, weight_nk: Tensor, seed: Tensor, trained: bool) -> Tensor:
        ctx.dtype = x_mk.dtype
        # Only a weight's gradient needs the input.
        ctx.save_for_backward(x_mk if trained else None, weight_nk, seed)
        return scaled_mm(quantize(x_mk), quantize(weight_nk), x_mk.dtype)

    @staticmethod
    def backward(ctx: Any, dout_mn: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_mk, weight_nk, seed = ctx.saved_tensors
        by_row, by_column = noises(random_bits(dout_mn.shape[0], dout_mn.shape[1], seed))
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = scaled_mm(quantize(dout_mn, by_row), columns(weight_nk), ctx.dtype)
        if ctx.needs_input_grad[1]:
            dweight = scaled_mm(columns(dout_mn, by_column), columns(x_mk), ctx.dtype).to(weight_nk.dtype)
        return dx, dweight, None, None
