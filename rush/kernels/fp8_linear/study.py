"""How fp8 linear layers are measured: the shapes of Llama's MLP, forward and both gradients, against bf16.

The casts are plain operators meant for torch.compile, so the compiled contenders matter. The tolerance is the format's:
e4m3 has three mantissa bits, which gives each matmul an error of about 4 %, e5m2 has two.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rush.kernels import study
from rush.kernels.fp8_linear import fp8_linear
from rush.kernels.study import Contender, Inputs, Pass, Size, Study, Work

TOLERANCE = 0.08


def make(size: Size, device: torch.device, dtype: torch.dtype) -> Inputs:
    tokens, inputs, outputs = size["tokens"], size["inputs"], size["outputs"]
    x = study.normal(device, 1, tokens, inputs).to(dtype)
    weight = study.normal(device, 2, outputs, inputs, scale=inputs**-0.5).to(dtype)
    return {"x": x.requires_grad_(), "weight": weight.requires_grad_()}


def plain(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def tensorwise(x: Tensor, weight: Tensor) -> Tensor:
    return fp8_linear(x, weight, recipe="tensorwise")


def rowwise(x: Tensor, weight: Tensor) -> Tensor:
    return fp8_linear(x, weight, recipe="rowwise")


def kernel_casts(x: Tensor, weight: Tensor) -> Tensor:
    return fp8_linear(x, weight, recipe="tensorwise", casts="kernel")


def interpreter_truncates(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "Triton's interpreter truncates fp8 instead of rounding it"


def work(size: Size, element: int, step: Pass) -> Work:
    """One matmul forward, two backward. Bytes: every operand and result once per matmul, in the unquantized dtype."""
    tokens, inputs, outputs = size["tokens"], size["inputs"], size["outputs"]
    matmuls = {"forward": 1, "backward": 2, "both": 3}[step]
    moved = tokens * inputs + outputs * inputs + tokens * outputs
    return Work(float(matmuls * moved * element), 2.0 * matmuls * tokens * inputs * outputs)


def _size(tokens: int, inputs: int, outputs: int, label: str, target: bool = True) -> Size:
    return Size(label, {"tokens": tokens, "inputs": inputs, "outputs": outputs}, target)


STUDY = Study(
    op="fp8_linear",
    about="A linear layer with fp8 operands: twice the FLOP rate, at the cost of casts and precision.",
    bound="matmul",
    axis="inputs",
    sizes=(
        _size(16384, 2048, 8192, "16k × 2048 → 8192"),
        _size(16384, 4096, 14336, "16k × 4096 → 14336", target=False),
        _size(16384, 8192, 2048, "16k × 8192 → 2048"),
    ),
    small=(_size(32, 64, 48, "32 × 64 → 48"), _size(32, 128, 48, "32 × 128 → 48")),
    make=make,
    reference=plain,
    contenders=(
        Contender("rush tensorwise, compiled", "ours", tensorwise, compile=True, tolerance=TOLERANCE),
        Contender("rush tensorwise", "ours", tensorwise, tolerance=TOLERANCE),
        Contender("rush casting kernel", "ours", kernel_casts, interpreter_truncates, tolerance=TOLERANCE),
        Contender("rush rowwise, compiled", "ours", rowwise, compile=True, tolerance=TOLERANCE),
        *study.torch_pair(plain),
    ),
    work=work,
    matmul_dtype="float8",
)
