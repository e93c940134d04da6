"""How RMSNorm is measured: alone and with the residual add, against torch's own and Liger's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rush.kernels import study
from rush.kernels.rmsnorm import add_rmsnorm, reference, rmsnorm
from rush.kernels.study import Contender, Inputs, Pass, Results, Size, Study, Work

EPS = 1e-5


def make(size: Size, device: torch.device, dtype: torch.dtype) -> Inputs:
    rows, columns = size["rows"], size["columns"]
    names = ["x", "residual"] if size["add"] else ["x"]
    found = {name: study.normal(device, seed, rows, columns).to(dtype) for seed, name in enumerate(names)}
    found["weight"] = (1 + 0.1 * study.normal(device, 7, columns)).to(dtype)
    return {name: tensor.requires_grad_() for name, tensor in found.items()}


def plain(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Results:
    if residual is None:
        return reference.rmsnorm(x, weight, EPS)
    return reference.add_rmsnorm(x, residual, weight, EPS)


def ours(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Results:
    return rmsnorm(x, weight, EPS) if residual is None else add_rmsnorm(x, residual, weight, EPS)


def torchs(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Results:
    if residual is None:
        return F.rms_norm(x, weight.shape, weight, EPS)
    total = residual + x
    return F.rms_norm(total, weight.shape, weight, EPS), total


def liger(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Results:
    from liger_kernel.ops import LigerFusedAddRMSNormFunction, LigerRMSNormFunction

    if residual is None:
        out: Tensor = LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", True)
        return out
    both: tuple[Tensor, ...] = LigerFusedAddRMSNormFunction.apply(
        x, residual, weight, EPS, 0.0, "llama", True
    )
    return both


def work(size: Size, element: int, step: Pass) -> Work:
    """Alone: read x, write out; backward read x and dout, write dx. The add reads and writes one more tensor each."""
    return (study.matrix_work(4, 4) if size["add"] else study.matrix_work(2, 3))(size, element, step)


def series(size: Size) -> str:
    return "with the residual add" if size["add"] else "alone"


STUDY = Study(
    op="rmsnorm",
    about="Normalizes each row by its root mean square, then the weight; a row is read once, so it is memory-bound.",
    bound="memory",
    axis="columns",
    sizes=study.with_residual(study.MATRICES),
    small=study.with_residual(study.SMALL_MATRICES),
    make=make,
    reference=plain,
    contenders=(
        study.ours(ours),
        *study.torch_pair(plain),
        Contender("torch's rms_norm", "baseline", torchs),
        study.liger(liger),
    ),
    work=work,
    targets=study.MEMORY_TARGETS,
    series=series,
)
