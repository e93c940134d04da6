"""What the operators of RMSNorm and LayerNorm share: checks, shapes for tracing, and autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rush.kernels.support import FLOATS, MAX_WIDTH, require, require_device

Backward = Callable[..., tuple[Tensor, ...]]
"""Returns the gradients of the normalized tensor and of the parameters."""


def check(op: str, x: Tensor, parameters: tuple[Tensor, ...], residual: Tensor | None) -> None:
    tensors = (x, *parameters) if residual is None else (x, *parameters, residual)
    require_device(op, *tensors)
    require(
        all(tensor.dtype in FLOATS for tensor in tensors),
        f"{op} takes fp32, bf16 and fp16; convert other dtypes first.",
    )
    require(parameters[0].dtype == parameters[-1].dtype, f"{op} needs its weight and bias in one dtype.")
    require(
        x.dim() > 0 and all(parameter.shape == x.shape[-1:] for parameter in parameters),
        f"{op} needs a weight{' and a bias' * (len(parameters) - 1)} as long as the last dim of its input.",
    )
    require(residual is None or residual.shape == x.shape, f"{op} needs a residual of the input's shape.")
    require(0 < x.shape[-1] <= MAX_WIDTH, f"{op} keeps whole rows in registers: at most {MAX_WIDTH} wide.")


def sum_dtype(x: Tensor, residual: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, residual.dtype)


def empty(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype or x.dtype)


def empty_statistic(x: Tensor) -> Tensor:
    """One fp32 number for each row."""
    return x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """For a norm. Inputs begin with x and the weight; outputs are the result and statistics of each row."""
    x, weight, *_ = inputs
    _, *statistics = output
    ctx.mark_non_differentiable(*statistics)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, *statistics)


def setup_context_add(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """The same with the residual after x, and the sum after the result."""
    x, residual, weight, *_ = inputs
    _, total, *statistics = output
    ctx.mark_non_differentiable(*statistics)
    ctx.set_materialize_grads(False)
    ctx.dtypes = x.dtype, residual.dtype
    ctx.save_for_backward(total, weight, *statistics)


def gradients(backward: Backward, num_parameters: int) -> Callable[..., tuple[Any, ...]]:
    """The backward function of a norm: gradients of x and the parameters, none of eps and dtype."""

    def gradients(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Any, ...]:
        if dout is None:
            return (None,) * (num_parameters + 3)
        return *backward(dout, *ctx.saved_tensors), None, None

    return gradients


def gradients_add(backward: Backward, backward_add: Backward, num_parameters: int) -> Callable[..., Any]:
    """The same for the norm of a sum. Either of the two results may be without a gradient."""

    def gradients(ctx: Any, dout: Tensor | None, dsum: Tensor | None, *_: Any) -> tuple[Any, ...]:
        found: tuple[Any, ...]
        if dout is None:
            found = dsum, *(None,) * num_parameters
        elif dsum is None:
            found = backward(dout, *ctx.saved_tensors)
        else:
            found = backward_add(dout, dsum, *ctx.saved_tensors)
        dtotal, *parameters = found
        if dtotal is None:
            return (None,) * (num_parameters + 4)
        x_dtype, residual_dtype = ctx.dtypes
        return dtotal.to(x_dtype), dtotal.to(residual_dtype), *parameters, None, None

    return gradients
