"""How GELU behind a bias is measured. The matmul before it adds the bias; plain torch adds it here, and sums its gradient
in a pass of its own, which is what the kernel saves."""

from __future__ import annotations

import torch
from torch import Tensor

from rush.kernels import study
from rush.kernels.bias_grad import gelu_bias_grad
from rush.kernels.gelu import reference
from rush.kernels.study import Inputs, Pass, Size, Study, Target, Work


def make(size: Size, device: torch.device, dtype: torch.dtype) -> Inputs:
    total = study.normal(device, 1, size["rows"], size["columns"]).to(dtype)
    bias = study.normal(device, 2, size["columns"]).to(dtype)
    return {"total": total.requires_grad_(), "bias": bias.requires_grad_()}


def plain(total: Tensor, bias: Tensor) -> Tensor:
    """The sum has the bias in it; only the gradient must reach both."""
    return reference.gelu(total + (bias - bias.detach()))


def ours(total: Tensor, bias: Tensor) -> Tensor:
    return gelu_bias_grad(total, bias)


def work(size: Size, element: int, step: Pass) -> Work:
    """Read and written; then two read and one written, with a row for the bias's gradient."""
    passes, sums = {"forward": (2, 0), "backward": (3, 1), "both": (5, 1)}[step]
    return Work(float((passes * size["rows"] + sums) * size["columns"] * element))


STUDY = Study(
    op="bias_grad",
    about="GELU of a layer's output with the gradient of the layer's bias; elementwise and a sum over rows, so memory bounds it.",
    bound="memory",
    axis="columns",
    sizes=study.MATRICES,
    small=study.SMALL_MATRICES,
    make=make,
    reference=plain,
    contenders=(study.ours(ours), *study.torch_pair(plain)),
    work=work,
    targets=(Target("ceiling", ("both",), at_least=0.85),),
)
