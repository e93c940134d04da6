"""How the example in C++ and CUDA is measured: against its Triton version, and against torch, eager and compiled.

All of them are memory-bound, so the best result is a tie: the question is whether CUDA is worth its lines of code. On a CPU the
C++ version is timed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rush.kernels import study
from rush.kernels.cuda_example import cannot_build, cannot_build_cuda, reference, squared_relu
from rush.kernels.study import Contender, Target


def cannot_run(device: torch.device) -> str | None:
    """CUDA source needs nvcc and ninja on the machine; the CPU version a C++ compiler."""
    return cannot_build_cuda() if device.type == "cuda" else cannot_build()


def in_triton(x: Tensor) -> Tensor:
    from rush.kernels.cuda_example.triton import squared_relu as call

    return call(x)


STUDY = study.matrix_study(
    "cuda_example",
    "The squared ReLU as C++ and CUDA source built on the spot; elementwise, so it is memory-bound.",
    reference.squared_relu,
    (
        Contender("rush", "ours", squared_relu, cannot_run),
        Contender("Triton", "baseline", in_triton, study.needs("triton")),
        *study.torch_pair(reference.squared_relu),
    ),
    (2, 3),  # read and written; then two read and one written
    (
        Target("ceiling", ("forward", "both"), at_least=0.85),
        Target("speed", ("forward", "both"), at_least=0.98, against="Triton"),
    ),
)
