"""How LayerNorm is measured: alone and with the residual add, against torch's own and Liger's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rush.kernels import study
from rush.kernels.layernorm import add_layernorm, layernorm, reference
from rush.kernels.rmsnorm import study as rmsnorm
from rush.kernels.rmsnorm.study import EPS
from rush.kernels.study import Inputs, Results, Size, Study


def make(size: Size, device: torch.device, dtype: torch.dtype) -> Inputs:
    bias = study.normal(device, 8, size["columns"], scale=0.1).to(dtype)
    return {**rmsnorm.make(size, device, dtype), "bias": bias.requires_grad_()}


def defined(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Results:
    if residual is None:
        return reference.layernorm(x, weight, bias, EPS)
    return reference.add_layernorm(x, residual, weight, bias, EPS)


def plain(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Results:
    """As the plain model: torch's operator, which is one kernel."""
    if residual is None:
        return F.layer_norm(x, weight.shape, weight, bias, EPS)
    total = residual + x
    return F.layer_norm(total, weight.shape, weight, bias, EPS), total


def ours(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Results:
    if residual is None:
        return layernorm(x, weight, bias, EPS)
    return add_layernorm(x, residual, weight, bias, EPS)


def liger(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Results:
    from liger_kernel.ops import LigerLayerNormFunction

    total = x if residual is None else residual + x
    out: Tensor = LigerLayerNormFunction.apply(total, weight, bias, EPS)
    return out if residual is None else (out, total)


STUDY = Study(
    op="layernorm",
    about="Normalizes each row, then weight and bias; a row is read once, so it is memory-bound.",
    bound="memory",
    axis="columns",
    sizes=study.with_residual(study.MATRICES),
    small=study.with_residual(study.SMALL_MATRICES),
    make=make,
    reference=defined,
    contenders=(study.ours(ours), *study.torch_pair(plain), study.liger(liger)),
    work=rmsnorm.work,
    targets=study.MEMORY_TARGETS,
    series=rmsnorm.series,
)
