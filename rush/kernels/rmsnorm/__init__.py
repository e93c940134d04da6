# mypy: allow-untyped-decorators
"""RMSNorm, alone or with the residual add before it.

Takes fp32, bf16 and fp16: statistics are fp32, and the normalized value is rounded to the input's dtype before it is
multiplied by the weight, as in the plain model. The result has the dtype that weight and input promote to, unless
`dtype` is given: under autocast the caller may pass the dtype of the next matmul and save a cast. Deterministic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rush.kernels.rmsnorm import triton as kernels
from rush.kernels.support import FLOATS, MAX_WIDTH, op, require, require_device

__all__ = ["add_rmsnorm", "rmsnorm"]


def rmsnorm(x: Tensor, weight: Tensor, eps: float, *, dtype: torch.dtype | None = None) -> Tensor:
    """x / rms(x) · weight along the last dim."""
    _check(x, weight)
    out: Tensor = _rmsnorm(x, weight, eps, dtype or torch.promote_types(x.dtype, weight.dtype))[0]
    return out


def add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of residual + x, and the sum (in the dtype the two promote to)."""
    _check(x, weight, residual)
    total_dtype = torch.promote_types(x.dtype, residual.dtype)
    out, total, _ = _add_rmsnorm(
        x, residual, weight, eps, dtype or torch.promote_types(total_dtype, weight.dtype)
    )
    return out, total


def _check(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    tensors = (x, weight) if residual is None else (x, weight, residual)
    require_device("rmsnorm", *tensors)
    require(
        all(tensor.dtype in FLOATS for tensor in tensors),
        "rmsnorm takes fp32, bf16 and fp16; convert other dtypes first.",
    )
    require(
        x.dim() > 0 and weight.shape == x.shape[-1:],
        "rmsnorm needs a weight as long as the last dim of its input.",
    )
    require(residual is None or residual.shape == x.shape, "rmsnorm needs a residual of the input's shape.")
    require(0 < x.shape[-1] <= MAX_WIDTH, f"rmsnorm keeps whole rows in registers: at most {MAX_WIDTH} wide.")


@op("rmsnorm")
def _rmsnorm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out, _, rstd = kernels.forward(x, None, weight.contiguous(), eps, dtype)
    return out, rstd


@op("add_rmsnorm")
def _add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    out, total, rstd = kernels.forward(x, residual, weight.contiguous(), eps, dtype)
    assert total is not None
    return out, total, rstd


@op("rmsnorm_backward")
def _rmsnorm_backward(dout: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return kernels.backward(dout, None, x, weight.contiguous(), rstd)


@op("add_rmsnorm_backward")
def _add_rmsnorm_backward(
    dout: Tensor, dsum: Tensor, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    return kernels.backward(dout, dsum, x, weight.contiguous(), rstd)


def _like(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _num_rows(x: Tensor) -> Any:
    return x.numel() // x.shape[-1]


@_rmsnorm.register_fake
def _(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _like(x, dtype), x.new_empty(_num_rows(x), dtype=torch.float32)


@_add_rmsnorm.register_fake
def _(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    total = _like(x, kernels.sum_dtype(x, residual))
    return _like(x, dtype), total, x.new_empty(_num_rows(x), dtype=torch.float32)


@_rmsnorm_backward.register_fake
def _(dout: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return _like(x, x.dtype), _like(weight, weight.dtype)


@_add_rmsnorm_backward.register_fake
def _(dout: Tensor, dsum: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return _like(x, x.dtype), _like(weight, weight.dtype)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, _ = inputs
    _, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, rstd)


def _gradients(ctx: Any, dout: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if dout is None:
        return None, None, None, None
    dx, dweight = _rmsnorm_backward(dout, *ctx.saved_tensors)
    return dx, dweight, None, None


def _setup_context_add(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, residual, weight, _, _ = inputs
    _, total, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)
    ctx.dtypes = x.dtype, residual.dtype
    ctx.save_for_backward(total, weight, rstd)


def _gradients_add(ctx: Any, dout: Tensor | None, dsum: Tensor | None, _: Any) -> tuple[Any, ...]:
    x_dtype, residual_dtype = ctx.dtypes
    if dout is None:
        dtotal, dweight = dsum, None
    elif dsum is None:
        dtotal, dweight = _rmsnorm_backward(dout, *ctx.saved_tensors)
    else:
        dtotal, dweight = _add_rmsnorm_backward(dout, dsum, *ctx.saved_tensors)
    if dtotal is None:
        return None, None, None, None, None
    return dtotal.to(x_dtype), dtotal.to(residual_dtype), dweight, None, None


_rmsnorm.register_autograd(_gradients, setup_context=_setup_context)
_add_rmsnorm.register_autograd(_gradients_add, setup_context=_setup_context_add)
