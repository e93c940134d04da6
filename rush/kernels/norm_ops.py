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


def register(
    norm: Any, add_norm: Any, backward: Any, add_backward: Any, num_parameters: int, num_statistics: int
) -> None:
    """Register shapes for tracing and autograd of a norm's operators: alone and after a residual add, forward and backward.

    They take x (the residual), the parameters, eps and the dtype of the result, in this order.
    """

    def statistics(x: Tensor) -> list[Tensor]:
        """fp32 numbers for each row."""
        rows = x.numel() // x.shape[-1]
        return [x.new_empty(rows, dtype=torch.float32) for _ in range(num_statistics)]

    def result(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return x.new_empty(x.shape, dtype=rest[-1]), *statistics(x)

    def add_result(x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        total = x.new_empty(x.shape, dtype=sum_dtype(x, residual))
        return x.new_empty(x.shape, dtype=rest[-1]), total, *statistics(x)

    def input_gradients(dout: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, ...]:
        return x.new_empty(x.shape), *(weight.new_empty(weight.shape) for _ in range(num_parameters))

    norm.register_fake(result)
    add_norm.register_fake(add_result)
    backward.register_fake(input_gradients)
    add_backward.register_fake(lambda dout, dsum, *saved: input_gradients(dout, *saved))
    norm.register_autograd(gradients(backward, num_parameters), setup_context=setup_context)
    add_norm.register_autograd(
        gradients_add(backward, add_backward, num_parameters), setup_context=setup_context_add
    )


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
