# mypy: allow-untyped-decorators
"""RMSNorm, alone or with the residual add before it.

Takes fp32, bf16 and fp16: statistics are fp32, and the normalized value is rounded to the input's dtype before it is
multiplied by the weight, as in the plain model. The result has the dtype that weight and input promote to, unless
`dtype` is given: under autocast the caller may pass the dtype of the next matmul and save a cast. Deterministic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rush.kernels import norm_ops, norm_rows
from rush.kernels.norm_ops import sum_dtype
from rush.kernels.rmsnorm.triton import rmsnorm_backward_kernel, rmsnorm_forward_kernel
from rush.kernels.support import op

__all__ = ["add_rmsnorm", "rmsnorm"]


def rmsnorm(x: Tensor, weight: Tensor, eps: float, *, dtype: torch.dtype | None = None) -> Tensor:
    """x / rms(x) · weight along the last dim."""
    norm_ops.check("rmsnorm", x, (weight,), None)
    out: Tensor = _rmsnorm(x, weight, eps, dtype or torch.promote_types(x.dtype, weight.dtype))[0]
    return out


def add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of residual + x, and the sum (in the dtype the two promote to)."""
    norm_ops.check("rmsnorm", x, (weight,), residual)
    dtype = dtype or torch.promote_types(sum_dtype(x, residual), weight.dtype)
    out, total, _ = _add_rmsnorm(x, residual, weight, eps, dtype)
    return out, total


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor]:
    parameters = (weight.contiguous(),)
    out, total, (rstd,) = norm_rows.forward(rmsnorm_forward_kernel, 1, x, residual, parameters, eps, dtype)
    return out, total, rstd


def _backward(
    dout: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    saved = x, weight.contiguous(), rstd
    dx, dweight = norm_rows.backward(rmsnorm_backward_kernel, 1, dout, dsum, *saved)
    return dx, dweight


@op("rmsnorm")
def _rmsnorm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    out, _, rstd = _forward(x, None, weight, eps, dtype)
    return out, rstd


@op("add_rmsnorm")
def _add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    out, total, rstd = _forward(x, residual, weight, eps, dtype)
    assert total is not None
    return out, total, rstd


@op("rmsnorm_backward")
def _rmsnorm_backward(dout: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return _backward(dout, None, x, weight, rstd)


@op("add_rmsnorm_backward")
def _add_rmsnorm_backward(
    dout: Tensor, dsum: Tensor, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    return _backward(dout, dsum, x, weight, rstd)


norm_ops.register(_rmsnorm, _add_rmsnorm, _rmsnorm_backward, _add_rmsnorm_backward, 1, num_statistics=1)
