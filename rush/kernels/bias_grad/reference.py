"""What follows a layer with a bias, in plain torch: the definition, in any dtype, float64 included."""

from __future__ import annotations

import torch
from torch import Tensor

from rush.kernels.gelu import reference

# Shapes: o output width of the layer.


def gelu_bias_grad(product: Tensor, bias_o: Tensor) -> Tensor:
    """GELU of a layer's product and bias."""
    return reference.gelu(product + bias_o)


def split_bias_grad(product: Tensor, bias_o: Tensor, count: int) -> tuple[Tensor, ...]:
    """The sum of a layer's product and bias, cut into equal parts along its last dim."""
    return torch.chunk(product + bias_o, count, dim=-1)
