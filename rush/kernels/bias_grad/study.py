"""How GELU with the bias gradient is measured. The matmul before it adds the bias; plain torch adds it here, and sums its
gradient in a separate pass, which the kernel saves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rush.kernels import study
from rush.kernels.bias_grad import gelu_bias_grad
from rush.kernels.gelu import reference
from rush.kernels.study import Inputs, Pass, Size, Study, Target, Work


def make(size: Size, device: torch.device, dtype: torch.dtype) -> Inputs:
    x = study.normal(device, 1, size["rows"], size["columns"]).to(dtype)
    bias = study.normal(device, 2, size["columns"]).to(dtype)
    return {"x": x.requires_grad_(), "bias": bias.requires_grad_()}


def plain(x: Tensor, bias: Tensor) -> Tensor:
    """The output includes the bias already; only the gradient must reach both."""
    return reference.gelu(x + (bias - bias.detach()))


def ours(x: Tensor, bias: Tensor) -> Tensor:
    return gelu_bias_grad(x, bias)


def work(size: Size, element: int, step: Pass) -> Work:
    """One read, one written; backward two read, one written, and a row for the bias gradient."""
    passes, sums = {"forward": (2, 0), "backward": (3, 1), "both": (5, 1)}[step]
    return Work(float((passes * size["rows"] + sums) * size["columns"] * element))


STUDY = Study(
    op="bias_grad",
    about="GELU of a linear layer's output with the bias gradient; elementwise and a sum over rows, so it is memory-bound.",
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
