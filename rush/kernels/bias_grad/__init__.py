# mypy: allow-untyped-decorators
"""What follows a layer with a bias, with the bias's gradient made on the way.

Both functions take the layer's output with the bias in it already (a matmul adds it for nothing) and the bias itself, of
which only the gradient is wanted: the sum over all rows of the output's gradient. The kernel that makes that gradient sums
it, too. Takes fp32, bf16 and fp16; fp32 inside, rounded once. Bitwise repeatable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rush.kernels.bias_grad import triton as kernels
from rush.kernels.gelu import triton as gelu
from rush.kernels.support import op, require, require_device

__all__ = ["gelu_bias_grad", "split_bias_grad"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PARTS = 3


def gelu_bias_grad(total: Tensor, bias_o: Tensor) -> Tensor:
    """GELU (tanh form) of a layer's output, which has the bias in it."""
    _check("gelu_bias_grad", total, bias_o)
    out: Tensor = _gelu_bias_grad(total, bias_o)
    return out


def split_bias_grad(total: Tensor, bias_o: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's output, which has the bias in it, cut into three equal parts along its last dim: views."""
    _check("split_bias_grad", total, bias_o)
    require(total.shape[-1] % PARTS == 0, "split_bias_grad cuts a last dim that is a multiple of three.")
    first, second, third = _Parts.apply(total, bias_o)  # type: ignore[no-untyped-call]
    return first, second, third


def _check(name: str, total: Tensor, bias_o: Tensor) -> None:
    require_device(name, total, bias_o)
    require(
        total.dtype in FLOATS and bias_o.dtype in FLOATS,
        f"{name} takes fp32, bf16 and fp16; convert other dtypes first.",
    )
    require(
        total.dim() > 0 and bias_o.shape == total.shape[-1:],
        f"{name} needs a bias as long as the last dim of the sum it is in.",
    )


@op("gelu_bias_grad")
def _gelu_bias_grad(total: Tensor, bias_o: Tensor) -> Tensor:
    return gelu.forward(total)


@op("gelu_bias_grad_backward")
def _gelu_bias_grad_backward(dout: Tensor, total: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return kernels.gelu_bias_grad_backward(dout, total, dtype)


@op("concat_bias_grad")
def _concat_bias_grad(
    first: Tensor, second: Tensor, third: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return kernels.joined([first, second, third], dtype)


@_gelu_bias_grad.register_fake
def _(total: Tensor, bias_o: Tensor) -> Tensor:
    return total.new_empty(total.shape)


@_gelu_bias_grad_backward.register_fake
def _(dout: Tensor, total: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return total.new_empty(total.shape), total.new_empty(total.shape[-1], dtype=dtype)


@_concat_bias_grad.register_fake
def _(first: Tensor, second: Tensor, third: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    width = PARTS * first.shape[-1]
    return first.new_empty(*first.shape[:-1], width), first.new_empty(width, dtype=dtype)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    total, bias_o = inputs
    ctx.dtype = bias_o.dtype
    ctx.save_for_backward(total)


def _gradients(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    (total,) = ctx.saved_tensors
    d_total, d_bias_o = _gelu_bias_grad_backward(dout, total, ctx.dtype)
    return d_total, d_bias_o


_gelu_bias_grad.register_autograd(_gradients, setup_context=_keep)


class _Parts(torch.autograd.Function):
    """Views of a sum; what comes back for them is laid side by side and summed in one kernel."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, bias_o: Tensor) -> tuple[Tensor, ...]:
        ctx.dtype = bias_o.dtype
        return torch.chunk(total, PARTS, dim=-1)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor, third: Tensor) -> tuple[Tensor, Tensor]:
        d_total, d_bias_o = _concat_bias_grad(first, second, third, ctx.dtype)
        return d_total, d_bias_o
