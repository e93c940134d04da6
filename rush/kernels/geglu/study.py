"""How GeGLU is measured, as SwiGLU is: it moves as many bytes."""

from __future__ import annotations

from torch import Tensor

from rush.kernels import study
from rush.kernels.geglu import geglu, reference


def liger(gate: Tensor, up: Tensor) -> Tensor:
    from liger_kernel.ops import LigerGELUMulFunction

    out: Tensor = LigerGELUMulFunction.apply(gate, up)
    return out


STUDY = study.matrix_study(
    "geglu",
    "gelu(gate) · up; elementwise, so it is memory-bound.",
    reference.geglu,
    (study.ours(geglu), *study.torch_pair(reference.geglu), study.liger(liger)),
    (3, 5),  # two read and one written; then three read and two written
    study.MEMORY_TARGETS,
    ("gate", "up"),
)
