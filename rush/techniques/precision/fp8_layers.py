"""Llama's MLP in fp8 as one function."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from rush.models.layers import FanOut, GatedMLP
from rush.techniques.api.seams import to_autocast_dtype
from rush.techniques.precision.cast_linear import pad_tokens

# Shapes: b batch, t position, d hidden.


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
