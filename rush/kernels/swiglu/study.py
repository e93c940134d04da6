"""How SwiGLU is measured. Liger's backward kernel overwrites its inputs with the gradients; it moves as many bytes."""

from __future__ import annotations

from torch import Tensor

from rush.kernels import study
from rush.kernels.swiglu import reference, swiglu


def liger(gate: Tensor, up: Tensor) -> Tensor:
    from liger_kernel.ops import LigerSiLUMulFunction

    out: Tensor = LigerSiLUMulFunction.apply(gate, up)
    return out


STUDY = study.matrix_study(
    "swiglu",
    "silu(gate) · up; elementwise, so it is memory-bound.",
    reference.swiglu,
    (study.ours(swiglu), *study.torch_pair(reference.swiglu), study.liger(liger)),
    (3, 5),  # two read and one written; then three read and two written
    study.MEMORY_TARGETS,
    ("gate", "up"),
)
