"""The operations after a linear layer with a bias, in plain torch: the reference for tests, in any dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from rush.kernels.gelu import reference

# Shapes: o output width of the layer.


def gelu_bias_grad(matmul: Tensor, bias_o: Tensor) -> Tensor:
    return reference.gelu(matmul + bias_o)


def split_bias_grad(matmul: Tensor, bias_o: Tensor, count: int) -> tuple[Tensor, ...]:
    return torch.chunk(matmul + bias_o, count, dim=-1)
