# mypy: allow-untyped-decorators
"""Operations after a linear layer with a bias, fused with the bias gradient (as cuBLASLt's BGRAD epilogues do).

Both functions take the layer's output with the bias already added (the matmul adds it for free), and the bias, whose
gradient is the sum over rows of the output's gradient: the kernel that writes that gradient also sums it. Takes fp32,
bf16 and fp16; computes in fp32 and rounds once. Deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rush.kernels.bias_grad import triton as kernels
from rush.kernels.gelu import triton as gelu
from rush.kernels.support import FLOATS, op, require, require_device

__all__ = ["gelu_bias_grad", "split_bias_grad"]

SPLITS = 3


def gelu_bias_grad(x: Tensor, bias_o: Tensor) -> Tensor:
    """GELU (tanh approximation) of a linear layer's output, bias included."""
    _check("gelu_bias_grad", x, bias_o)
    out: Tensor = _gelu_bias_grad(x, bias_o)
    return out


def split_bias_grad(x: Tensor, bias_o: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A linear layer's output, bias included, split into three equal views along its last dim."""
    _check("split_bias_grad", x, bias_o)
    require(x.shape[-1] % SPLITS == 0, "split_bias_grad needs a last dim that is a multiple of three.")
    first, second, third = _Split.apply(x, bias_o)  # type: ignore[no-untyped-call]
    return first, second, third


def _check(name: str, x: Tensor, bias_o: Tensor) -> None:
    require_device(name, x, bias_o)
    require(
        x.dtype in FLOATS and bias_o.dtype in FLOATS,
        f"{name} takes fp32, bf16 and fp16; convert other dtypes first.",
    )
    require(
        x.dim() > 0 and bias_o.shape == x.shape[-1:],
        f"{name} needs a bias as long as the last dim of the output.",
    )


@op("gelu_bias_grad")
def _gelu_bias_grad(x: Tensor, bias_o: Tensor) -> Tensor:
    return gelu.forward(x)


@op("gelu_bias_grad_backward")
def _gelu_bias_grad_backward(dout: Tensor, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return kernels.gelu_bias_grad_backward(dout, x, dtype)


@op("concat_bias_grad")
def _concat_bias_grad(
    first: Tensor, second: Tensor, third: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return kernels.concat_bias_grad([first, second, third], dtype)


@_gelu_bias_grad.register_fake
def _(x: Tensor, bias_o: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@_gelu_bias_grad_backward.register_fake
def _(dout: Tensor, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1], dtype=dtype)


@_concat_bias_grad.register_fake
def _(first: Tensor, second: Tensor, third: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    width = SPLITS * first.shape[-1]
    return first.new_empty(*first.shape[:-1], width), first.new_empty(width, dtype=dtype)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    x, bias_o = inputs
    ctx.dtype = bias_o.dtype
    ctx.save_for_backward(x)


def _gradients(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    (x,) = ctx.saved_tensors
    dx, d_bias_o = _gelu_bias_grad_backward(dout, x, ctx.dtype)
    return dx, d_bias_o


_gelu_bias_grad.register_autograd(_gradients, setup_context=_setup_context)


class _Split(torch.autograd.Function):
    """Views; their gradients are concatenated and summed over rows in one kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias_o: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = bias_o.dtype
        return torch.chunk(x, SPLITS, dim=-1)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor]:
        dx, d_bias_o = _concat_bias_grad(first, second, third, ctx.dtype)
        return dx, d_bias_o
