"""Linear layers whose matmuls cast their operands (fp8, int8): what they share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from rush.models import Decoder
from rush.recipe import Recipe
from rush.techniques.api.seams import to_autocast_dtype

# Shapes: b batch, t position, n tokens, d hidden, v vocabulary.

ALIGNMENT = 16
"""Widths must be multiples of this."""
Matmul = Callable[[Tensor, Tensor], Tensor]


def pad_tokens(x: Tensor, multiply: Callable[[Tensor], Tensor], multiple: int = ALIGNMENT) -> Tensor:
    """Zero-pad the tokens to a multiple, as the hardware requires; zeros change no scale and no gradient."""
    tokens_nd = x.reshape(-1, x.shape[-1])
    missing = -len(tokens_nd) % multiple
    if not missing:
        return multiply(x)
    out_nk = multiply(F.pad(tokens_nd, (0, 0, 0, missing)))[:-missing]
    return out_nk.reshape(*x.shape[:-1], -1)


class CastLinear(nn.Linear):
    """nn.Linear over the same weight and bias with another matmul, of tokens in this multiple."""

    def __init__(self, plain: nn.Linear, matmul: Matmul, multiple: int = ALIGNMENT) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight, self.bias, self.matmul, self.multiple = plain.weight, plain.bias, matmul, multiple

    def forward(self, x: Tensor) -> Tensor:
        out = self.matmul_with(x, self.weight)
        return out if self.bias is None else out + self.bias.to(out.dtype)

    def matmul_with(self, x: Tensor, weight: Tensor) -> Tensor:
        """The matmul without bias, with this layer's weight or one that several layers share."""
        return project(self.matmul, self.multiple, x, weight)


def project(matmul: Matmul, multiple: int, x: Tensor, weight: Tensor) -> Tensor:
    """x · weightᵀ in the dtype of autocast, the tokens padded."""
    (x,) = to_autocast_dtype(x)
    return pad_tokens(x, lambda padded: matmul(padded, weight), multiple)


def projection(matmul: Matmul, multiple: int = ALIGNMENT) -> Matmul:
    """Hidden states to logits by this matmul."""
    return partial(project, matmul, multiple)


def cast_blocks(model: Decoder, matmul: Matmul, multiple: int = ALIGNMENT) -> list[CastLinear]:
    """Give the linear layers of the blocks, not the LM head, this matmul; returns them."""
    made = []
    for role, layers in model.linears().items():
        for name, plain in layers if role != "head" else []:
            parent, _, own = name.rpartition(".")
            made.append(CastLinear(plain, matmul, multiple))
            setattr(model.get_submodule(parent), own, made[-1])
    return made


def block_widths(recipe: Recipe) -> tuple[int, ...]:
    """The widths of the blocks' linear layers on one rank."""
    shape, tp = recipe.shape(), recipe.layout.tp
    sharded = (shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.intermediate)
    return (shape.hidden, *(size // tp for size in sharded))
