# mypy: allow-untyped-decorators
"""LayerNorm with weight and bias, alone or with the residual add before it.

Takes fp32, bf16 and fp16; computes in fp32 and rounds once. The result has the dtype that weight and input promote to,
unless `dtype` is given: under autocast the caller may pass the dtype of the next matmul and save a cast. Deterministic.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rush.kernels import norm_ops, norm_rows
from rush.kernels.layernorm.triton import layernorm_backward_kernel, layernorm_forward_kernel
from rush.kernels.norm_ops import sum_dtype
from rush.kernels.support import op

__all__ = ["add_layernorm", "layernorm"]


def layernorm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, dtype: torch.dtype | None = None
) -> Tensor:
    """(x − mean) / deviation · weight + bias along the last dim."""
    norm_ops.check("layernorm", x, (weight, bias), None)
    out: Tensor = _layernorm(x, weight, bias, eps, dtype or torch.promote_types(x.dtype, weight.dtype))[0]
    return out


def add_layernorm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of residual + x, and the sum (in the dtype the two promote to)."""
    norm_ops.check("layernorm", x, (weight, bias), residual)
    dtype = dtype or torch.promote_types(sum_dtype(x, residual), weight.dtype)
    out, total, _, _ = _add_layernorm(x, residual, weight, bias, eps, dtype)
    return out, total


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    parameters = weight.contiguous(), bias.contiguous()
    out, total, (mean, rstd) = norm_rows.forward(
        layernorm_forward_kernel, 2, x, residual, parameters, eps, dtype
    )
    return out, total, mean, rstd


def _backward(
    dout: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    saved = x, weight.contiguous(), mean, rstd
    dx, dweight, dbias = norm_rows.backward(layernorm_backward_kernel, 2, dout, dsum, *saved)
    return dx, dweight, dbias


@op("layernorm")
def _layernorm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    out, _, mean, rstd = _forward(x, None, weight, bias, eps, dtype)
    return out, mean, rstd


@op("add_layernorm")
def _add_layernorm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, total, mean, rstd = _forward(x, residual, weight, bias, eps, dtype)
    assert total is not None
    return out, total, mean, rstd


@op("layernorm_backward")
def _layernorm_backward(
    dout: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(dout, None, x, weight, mean, rstd)


@op("add_layernorm_backward")
def _add_layernorm_backward(
    dout: Tensor, dsum: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(dout, dsum, x, weight, mean, rstd)


norm_ops.register(
    _layernorm, _add_layernorm, _layernorm_backward, _add_layernorm_backward, 2, num_statistics=2
)
