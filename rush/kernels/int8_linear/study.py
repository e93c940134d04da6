"""How int8 linear layers are measured: as those in fp8, against bf16.

The casts are plain operators meant for torch.compile, so the compiled contender matters. The tolerance is the format's: rows
of normal numbers lose about 1 % in each matmul, gradients, rounded stochastically, twice that.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from rush.kernels import study
from rush.kernels.fp8_linear.study import STUDY as OF_FP8
from rush.kernels.fp8_linear.study import plain
from rush.kernels.int8_linear import int8_linear
from rush.kernels.study import Contender

TOLERANCE = 0.04


def rowwise(x: Tensor, weight: Tensor) -> Tensor:
    return int8_linear(x, weight)


STUDY = replace(
    OF_FP8,
    op="int8_linear",
    about="A linear layer with int8 operands: twice the FLOP rate or more, at the cost of casts and precision.",
    contenders=(
        Contender("rush, compiled", "ours", rowwise, compile=True, tolerance=TOLERANCE),
        Contender("rush", "ours", rowwise, tolerance=TOLERANCE),
        *study.torch_pair(plain),
    ),
    matmul_dtype="int8",
)
