"""How GeGLU is measured, as SwiGLU is: it moves as many bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from rush.kernels import study
from rush.kernels.geglu import geglu, reference
from rush.kernels.study import Inputs, Size, Study


def make(size: Size, device: torch.device, dtype: torch.dtype) -> Inputs:
    drawn = (study.normal(device, seed, size["rows"], size["columns"]).to(dtype) for seed in (1, 2))
    return {name: tensor.requires_grad_() for name, tensor in zip(("gate", "up"), drawn, strict=True)}


def liger(gate: Tensor, up: Tensor) -> Tensor:
    from liger_kernel.ops import LigerGELUMulFunction

    out: Tensor = LigerGELUMulFunction.apply(gate, up)
    return out


STUDY = Study(
    op="geglu",
    about="gelu(gate) · up; elementwise, so it is memory-bound.",
    bound="memory",
    axis="columns",
    sizes=study.MATRICES,
    small=study.SMALL_MATRICES,
    on_cpu=study.MATRICES_ON_CPU,
    make=make,
    reference=reference.geglu,
    contenders=(study.ours(geglu), *study.torch_pair(reference.geglu), study.liger(liger)),
    work=study.matrix_work(3, 5),  # two read and one written; then three read and two written
    targets=study.MEMORY_TARGETS,
)
