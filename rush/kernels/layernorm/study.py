"""How LayerNorm is measured: alone and with the residual add, against torch's own and Liger's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rush.kernels import study
from rush.kernels.layernorm import add_layernorm, layernorm, reference
from rush.kernels.study import Inputs, Pass, Size, Study, Work

EPS = 1e-5


def make(size: Size, device: torch.device, dtype: torch.dtype) -> Inputs:
    rows, columns = size["rows"], size["columns"]
    names = ["x", "residual"] if size["add"] else ["x"]
    found = {name: study.normal(device, seed, rows, columns).to(dtype) for seed, name in enumerate(names)}
    found["weight"] = (1 + 0.1 * study.normal(device, 7, columns)).to(dtype)
    found["bias"] = study.normal(device, 8, columns, scale=0.1).to(dtype)
    return {name: tensor.requires_grad_() for name, tensor in found.items()}


def defined(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, ...]:
    if residual is None:
        return reference.layernorm(x, weight, bias, EPS)
    return reference.add_layernorm(x, residual, weight, bias, EPS)


def plain(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, ...]:
    """As the plain model: torch's operator, which is one kernel."""
    if residual is None:
        return F.layer_norm(x, weight.shape, weight, bias, EPS)
    total = residual + x
    return F.layer_norm(total, weight.shape, weight, bias, EPS), total


def ours(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, ...]:
    if residual is None:
        return layernorm(x, weight, bias, EPS)
    return add_layernorm(x, residual, weight, bias, EPS)


def liger(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None
) -> Tensor | tuple[Tensor, ...]:
    from liger_kernel.ops import LigerLayerNormFunction

    total = x if residual is None else residual + x
    out: Tensor = LigerLayerNormFunction.apply(total, weight, bias, EPS)
    return out if residual is None else (out, total)


def work(size: Size, element: int, step: Pass) -> Work:
    """Alone: read x, write out; backward read x and dout, write dx. The add reads and writes one more tensor each."""
    forward, backward = (4, 4) if size["add"] else (2, 3)
    passes = {"forward": forward, "backward": backward, "both": forward + backward}[step]
    return Work(float(passes * size["rows"] * size["columns"] * element))


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
    work=work,
    targets=study.MEMORY_TARGETS,
    series=lambda size: "with the residual add" if size["add"] else "alone",
)
