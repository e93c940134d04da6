# mypy: allow-untyped-decorators
"""GELU in its tanh form (GPT-2's), nothing kept but its input.

Takes fp32, bf16 and fp16 (under autocast: what the linear layer gives); fp32 inside, rounded once. An input
whose elements do not lie side by side is copied first. Bitwise repeatable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rush.kernels import cpu
from rush.kernels.support import op, require, require_device, uses_cpp

__all__ = ["gelu"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def gelu(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))), element by element."""
    require_device("gelu", x, has_cpu=True)
    require(x.dtype in FLOATS, "gelu takes fp32, bf16 and fp16; convert other dtypes first.")
    out: Tensor = _gelu(x)
    return out


@op("gelu")
def _gelu(x: Tensor) -> Tensor:
    if uses_cpp(x):
        return cpu.gelu_forward(x)
    from rush.kernels.gelu import triton as kernels

    return kernels.forward(x)


@op("gelu_backward")
def _gelu_backward(dout: Tensor, x: Tensor) -> Tensor:
    if uses_cpp(x):
        return cpu.gelu_backward(dout, x)
    from rush.kernels.gelu import triton as kernels

    return kernels.backward(dout, x)


@_gelu.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@_gelu_backward.register_fake
def _(dout: Tensor, x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dout: Tensor) -> Tensor:
    dx: Tensor = _gelu_backward(dout, *ctx.saved_tensors)
    return dx


_gelu.register_autograd(_gradients, setup_context=_keep)
