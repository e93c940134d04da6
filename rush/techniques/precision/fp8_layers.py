"""Modules of fp8: a linear layer, the LM head's projection, Llama's MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from rush.models.layers import FanOut, GatedMLP
from rush.techniques.api.seams import to_autocast_dtype

# Shapes: b batch, t position, n tokens, d hidden, j twice the MLP's width, v vocabulary.

ALIGNMENT = 16
"""Tokens and widths must be multiples of this."""
Matmul = Callable[[Tensor, Tensor], Tensor]


def pad_tokens(x: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """Zero-pad the tokens to a multiple of 16, as the hardware requires; zeros change no scale and no gradient."""
    tokens_nd = x.reshape(-1, x.shape[-1])
    missing = -len(tokens_nd) % ALIGNMENT
    if not missing:
        return multiply(x)
    out_nk = multiply(F.pad(tokens_nd, (0, 0, 0, missing)))[:-missing]
    return out_nk.reshape(*x.shape[:-1], -1)


class Fp8Linear(nn.Linear):
    """nn.Linear over the same weight and bias with fp8 matmuls."""

    def __init__(self, plain: nn.Linear, matmul: Matmul) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias, self.matmul = plain.weight, plain.bias, matmul

    def forward(self, x: Tensor) -> Tensor:
        out = self.matmul_with(x, self.weight)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def matmul_with(self, x: Tensor, weight: Tensor) -> Tensor:
        """The matmul without bias, with this layer's weight or one that several layers share."""
        (x,) = to_autocast_dtype(x)
        return pad_tokens(x, lambda padded: self.matmul(padded, weight))


def fp8_projection(matmul: Matmul) -> Matmul:
    """Hidden states to logits by an fp8 matmul."""

    def project(hidden_nd: Tensor, head_weight_vd: Tensor) -> Tensor:
        (hidden_nd,) = to_autocast_dtype(hidden_nd)
        return pad_tokens(hidden_nd, lambda padded: matmul(padded, head_weight_vd))

    return project


class Fp8GatedMLP(nn.Module):
    """Llama's MLP over the same layers, as one function: `mlp(x, weight of gate and up, weight of down)`."""

    def __init__(self, plain: GatedMLP, mlp: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up, self.down = plain.gate, plain.up, plain.down
        self.fan_out, self.mlp = plain.fan_out, mlp

    def forward(self, x_btd: Tensor) -> Tensor:
        (x_btd,) = to_autocast_dtype(x_btd)
        assert isinstance(self.fan_out, FanOut)
        joined = self.fan_out.weight(self.gate, self.up)
        return pad_tokens(x_btd, lambda padded: self.mlp(padded, joined, self.down.weight))
