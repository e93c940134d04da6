# mypy: allow-untyped-decorators
"""LayerNorm with weight and bias, alone or with the residual add before it.

Takes fp32, bf16 and fp16; computes in fp32 and rounds once. The result has the dtype that weight and input promote to,
unless `dtype` is given: under autocast the caller may pass the dtype of the next matmul and save a cast. Deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rush.kernels.layernorm import triton as kernels
from rush.kernels.support import FLOATS, MAX_WIDTH, op, require, require_device

__all__ = ["add_layernorm", "layernorm"]


def layernorm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, dtype: torch.dtype | None = None
) -> Tensor:
    """(x − mean) / deviation · weight + bias along the last dim."""
    _check(x, weight, bias)
    out: Tensor = _layernorm(x, weight, bias, eps, dtype or torch.promote_types(x.dtype, weight.dtype))[0]
    return out


def add_layernorm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of residual + x, and the sum (in the dtype the two promote to)."""
    _check(x, weight, bias, residual)
    total_dtype = torch.promote_types(x.dtype, residual.dtype)
    out, total, _, _ = _add_layernorm(
        x, residual, weight, bias, eps, dtype or torch.promote_types(total_dtype, weight.dtype)
    )
    return out, total


def _check(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> None:
    tensors = (x, weight, bias) if residual is None else (x, weight, bias, residual)
    require_device("layernorm", *tensors)
    require(
        all(tensor.dtype in FLOATS for tensor in tensors),
        "layernorm takes fp32, bf16 and fp16; convert other dtypes first.",
    )
    require(weight.dtype == bias.dtype, "layernorm needs its weight and bias in one dtype.")
    require(
        x.dim() > 0 and weight.shape == x.shape[-1:] and bias.shape == weight.shape,
        "layernorm needs a weight and a bias as long as the last dim of its input.",
    )
    require(residual is None or residual.shape == x.shape, "layernorm needs a residual of the input's shape.")
    require(
        0 < x.shape[-1] <= MAX_WIDTH, f"layernorm keeps whole rows in registers: at most {MAX_WIDTH} wide."
    )


@op("layernorm")
def _layernorm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    out, _, mean, rstd = kernels.forward(x, None, weight.contiguous(), bias.contiguous(), eps, dtype)
    return out, mean, rstd


@op("add_layernorm")
def _add_layernorm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, total, mean, rstd = kernels.forward(x, residual, weight.contiguous(), bias.contiguous(), eps, dtype)
    assert total is not None
    return out, total, mean, rstd


@op("layernorm_backward")
def _layernorm_backward(
    dout: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return kernels.backward(dout, None, x, weight.contiguous(), mean, rstd)


@op("add_layernorm_backward")
def _add_layernorm_backward(
    dout: Tensor, dsum: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return kernels.backward(dout, dsum, x, weight.contiguous(), mean, rstd)


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _of_rows(x: Tensor) -> Tensor:
    return x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


@_layernorm.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(x, dtype), _of_rows(x), _of_rows(x)


@_add_layernorm.register_fake
def _(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _like(x, dtype), _like(x, kernels.sum_dtype(x, residual)), _of_rows(x), _of_rows(x)


@_layernorm_backward.register_fake
def _(dout: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _like(x, x.dtype), _like(weight, weight.dtype), _like(weight, weight.dtype)


@_add_layernorm_backward.register_fake
def _(
    dout: Tensor, dsum: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(x, x.dtype), _like(weight, weight.dtype), _like(weight, weight.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, _, _, _ = inputs
    _, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, mean, rstd)


def _gradients(ctx: Any, dout: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if dout is None:
        return None, None, None, None, None
    dx, dweight, dbias = _layernorm_backward(dout, *ctx.saved_tensors)
    return dx, dweight, dbias, None, None


def _setup_context_add(
    ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]
) -> None:
    x, residual, weight, _, _, _ = inputs
    _, total, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    ctx.dtypes = x.dtype, residual.dtype
    ctx.save_for_backward(total, weight, mean, rstd)


def _gradients_add(ctx: Any, dout: Tensor | None, dsum: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x_dtype, residual_dtype = ctx.dtypes
    dweight = dbias = None
    if dout is None:
        dtotal = dsum
    elif dsum is None:
        dtotal, dweight, dbias = _layernorm_backward(dout, *ctx.saved_tensors)
    else:
        dtotal, dweight, dbias = _add_layernorm_backward(dout, dsum, *ctx.saved_tensors)
    if dtotal is None:
        return None, None, None, None, None, None
    return dtotal.to(x_dtype), dtotal.to(residual_dtype), dweight, dbias, None, None


_layernorm.register_autograd(_gradients, setup_context=_setup_context)
_add_layernorm.register_autograd(_gradients_add, setup_context=_setup_context_add)
