"""How Llama's MLP with fp8 matmuls is measured: as one function, as separate layers, and in bf16.

Every matmul adds the error of its format (see fp8_linear's study); two are chained forward and four backward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rush.kernels import study
from rush.kernels.fp8_linear import fp8_linear
from rush.kernels.fp8_linear.study import interpreter_truncates
from rush.kernels.fp8_mlp import fp8_mlp
from rush.kernels.study import Contender, Inputs, Pass, Size, Study, Target, Work

TOLERANCE = 0.12


def make(size: Size, device: torch.device, dtype: torch.dtype) -> Inputs:
    tokens, hidden, width = size["tokens"], size["hidden"], size["width"]
    found = {
        "x": study.normal(device, 1, tokens, hidden),
        "weight": study.normal(device, 2, 2 * width, hidden, scale=hidden**-0.5),
        "down": study.normal(device, 3, hidden, width, scale=width**-0.5),
    }
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in found.items()}


def plain(x: Tensor, weight: Tensor, down: Tensor) -> Tensor:
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, down)


def one_function(x: Tensor, weight: Tensor, down: Tensor) -> Tensor:
    return fp8_mlp(x, weight, down)


def layers(x: Tensor, weight: Tensor, down: Tensor) -> Tensor:
    gate, up = fp8_linear(x, weight).chunk(2, dim=-1)
    return fp8_linear(F.silu(gate) * up, down)


def work(size: Size, element: int, step: Pass) -> Work:
    """Three matmuls forward, twice that backward. Bytes: every operand and result once, in the unquantized dtype."""
    tokens, hidden, width = size["tokens"], size["hidden"], size["width"]
    passes = {"forward": 1, "backward": 2, "both": 3}[step]
    moved = 2 * tokens * hidden + 3 * hidden * width + 3 * tokens * width
    return Work(float(passes * moved * element), 6.0 * passes * tokens * hidden * width)


def _size(tokens: int, hidden: int, width: int, label: str, target: bool = True) -> Size:
    return Size(label, {"tokens": tokens, "hidden": hidden, "width": width}, target)


STUDY = Study(
    op="fp8_mlp",
    about="Llama's MLP with fp8 matmuls and fused SwiGLU kernels between them.",
    bound="matmul",
    axis="width",
    sizes=(
        _size(32768, 2048, 8192, "32k × 2048 × 8192"),
        _size(8192, 4096, 14336, "8k × 4096 × 14336", target=False),
    ),
    small=(_size(32, 32, 48, "32 × 32 × 48"), _size(32, 32, 80, "32 × 32 × 80")),
    make=make,
    reference=plain,
    contenders=(
        Contender("rush, compiled", "ours", one_function, interpreter_truncates, TOLERANCE, compile=True),
        Contender("rush", "ours", one_function, interpreter_truncates, TOLERANCE),
        Contender("layers alone", "baseline", layers, tolerance=TOLERANCE),
        Contender("layers alone, compiled", "baseline", layers, compile=True, tolerance=TOLERANCE),
        *study.torch_pair(plain),
    ),
    work=work,
    targets=(Target("speed", ("both",), at_least=1.0, against="layers alone, compiled"),),
    matmul_dtype="float8",
)
