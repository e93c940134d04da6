"""How the global gradient norm is measured: over a list of tensors, against torch's norm per tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from rush.kernels import study
from rush.kernels.adamw.table import Divisions
from rush.kernels.grad_norm import grad_norm, reference
from rush.kernels.study import Contender, Inputs, Pass, Size, Study, Target, Work

TENSORS = 8


def make(size: Size, device: torch.device, dtype: torch.dtype) -> Inputs:
    each = size["elements"] // TENSORS
    return {f"x_{index}": study.normal(device, index, each).to(dtype) for index in range(TENSORS)}


def defined(**inputs: Tensor) -> Tensor:
    return reference.grad_norm(list(inputs.values()))


class GradNorm:
    """As an optimizer calls it: the division of the work is kept from step to step."""

    def __init__(self) -> None:
        self.divisions: Divisions = {}

    def __call__(self, **inputs: Tensor) -> Tensor:
        return grad_norm(list(inputs.values()), self.divisions)


def foreach(**inputs: Tensor) -> Tensor:
    norms = torch._foreach_norm(list(inputs.values()), 2, dtype=torch.float32)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def work(size: Size, element: int, step: Pass) -> Work:
    """Everything read once."""
    return Work(float(size["elements"] * element))


STUDY = Study(
    op="grad_norm",
    about="The global gradient norm, for clipping; gradients are read once, so it is memory-bound.",
    bound="memory",
    axis="elements",
    sizes=tuple(Size(f"{millions}M", {"elements": millions * 2**20}) for millions in (64, 256, 1024)),
    small=(Size("4,096", {"elements": 4096}), Size("16,384", {"elements": 16384})),
    make=make,
    reference=defined,
    contenders=(
        Contender("rush", "ours", GradNorm()),
        Contender("plain torch", "plain", defined),
        Contender("torch foreach", "baseline", foreach),
    ),
    work=work,
    targets=(Target("speed", ("forward",), at_least=1.0, against="torch foreach"),),
    passes=("forward",),
)
