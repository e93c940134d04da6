"""How GELU is measured. Liger has it only as GEGLU, so it is no contender."""

from __future__ import annotations

import torch

from rush.kernels import study
from rush.kernels.gelu import gelu, reference
from rush.kernels.study import Inputs, Size, Study, Target


def make(size: Size, device: torch.device, dtype: torch.dtype) -> Inputs:
    return {"x": study.normal(device, 1, size["rows"], size["columns"]).to(dtype).requires_grad_()}


STUDY = Study(
    op="gelu",
    about="GPT-2's activation (tanh approximation); elementwise, so it is memory-bound.",
    bound="memory",
    axis="columns",
    sizes=study.MATRICES,
    small=study.SMALL_MATRICES,
    on_cpu=study.MATRICES_ON_CPU,
    make=make,
    reference=reference.gelu,
    contenders=(study.ours(gelu), *study.torch_pair(reference.gelu)),
    work=study.matrix_work(2, 3),  # read and written; then two read and one written
    targets=(Target("ceiling", ("forward", "both"), at_least=0.85),),
)
