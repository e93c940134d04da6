"""The modules that fp8 puts in place of a model's own: a linear layer, the head's projection, Llama's MLP."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from rush.models.layers import FanOut, GatedMLP
from rush.techniques.api.seams import to_autocast_dtype
from rush.techniques.kernels.chunked_loss import Projection

# Shapes: b batch, t position, n tokens, d hidden, j twice the MLP's width, v vocabulary.

ALIGNMENT = 16
"""Tokens and widths come in multiples of this."""
Product = Callable[[Tensor, Tensor], Tensor]


def in_tiles(x: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """Multiply in fp8 whatever the number of tokens: rows that are padded to their longest have any, and the hardware takes
    multiples of 16. Zeros make up for the rest; they change no scale and no gradient."""
    tokens_nd = x.reshape(-1, x.shape[-1])
    missing = -len(tokens_nd) % ALIGNMENT
    if not missing:
        return multiply(x)
    out_nk = multiply(F.pad(tokens_nd, (0, 0, 0, missing)))[:-missing]
    return out_nk.reshape(*x.shape[:-1], -1)


class Fp8Linear(nn.Linear):
    """A linear layer over the same weight and bias, with 8-bit products."""

    def __init__(self, plain: nn.Linear, product: Product) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias, self.product = plain.weight, plain.bias, product

    def forward(self, x: Tensor) -> Tensor:
        out = self.multiply(x, self.weight)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def multiply(self, x: Tensor, weight: Tensor) -> Tensor:
        """The product alone, with a weight of its own or one that several layers share."""
        (x,) = to_autocast_dtype(x)
        return in_tiles(x, lambda padded: self.product(padded, weight))


class Fp8Projection(Projection):
    """From hidden vectors to logits by an 8-bit product; the vocabulary padded with zeros where it must be."""

    def __init__(self, padded: int, product: Product) -> None:
        super().__init__()
        self.padded, self.product = padded, product

    def forward(self, hidden_nd: Tensor, head_weight_vd: Tensor) -> Tensor:
        vocab_size = head_weight_vd.shape[0]
        weight = F.pad(head_weight_vd, (0, 0, 0, self.padded - vocab_size))
        (hidden_nd,) = to_autocast_dtype(hidden_nd)
        return in_tiles(hidden_nd, lambda padded: self.product(padded, weight))[..., :vocab_size]


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
        return in_tiles(x_btd, lambda padded: self.mlp(padded, joined, self.down.weight))
