"""GPT-2: learned positions, LayerNorm, GELU, biases, a head tied to the embedding.

Queries, keys and values come from one fused linear layer, as published: its output is three equal
parts, each with the heads side by side. (The original applies dropout; single-epoch pretraining today does not, and neither
do we.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from rush.models.decoder import Block, Decoder
from rush.models.layers import GeluMLP, LayerCache, LayerNorm, PlainAttention
from rush.models.shape import AttentionForm, Shape


class Split(nn.Module):
    """Splits a layer's output into queries, keys and values: a slot for a fused backward pass."""

    def forward(self, x_btd: Tensor, layer: nn.Module) -> tuple[Tensor, ...]:
        total: Tensor = layer(x_btd)
        return total.chunk(3, dim=-1)


class FusedAttention(nn.Module):
    """Self-attention with one fused linear layer for queries, keys and values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.form = AttentionForm()
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden)
        self.split: nn.Module = Split()
        self.core: nn.Module = PlainAttention()
        self.out = nn.Linear(shape.hidden, shape.hidden)

    def forward(
        self,
        x_btd: Tensor,
        *,
        rotary: tuple[Tensor, Tensor] | None = None,
        documents: Any = None,
        cache: LayerCache | None = None,
        query_offset: int = 0,
    ) -> Tensor:
        assert rotary is None, "GPT-2's positions are part of its embedding"
        q_bhtd, k_bhtd, v_bhtd = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in self.split(x_btd, self.qkv)
        )
        if cache is not None:
            k_bhtd, v_bhtd = cache.extend(k_bhtd, v_bhtd, query_offset)
        o_bhtd = self.core(q_bhtd, k_bhtd, v_bhtd, documents=documents, query_offset=query_offset)
        out: Tensor = self.out(o_bhtd.transpose(1, 2).flatten(2))
        return out


class GPT2(Decoder):
    """The GPT-2 family."""

    block_linears: ClassVar[Mapping[str, str]] = {
        "qkv": "attention.qkv",
        "attention_out": "attention.out",
        "mlp_up": "mlp.up",
        "mlp_down": "mlp.down",
    }

    def __init__(self, shape: Shape) -> None:
        def norm() -> LayerNorm:
            return LayerNorm(shape.hidden, shape.norm_eps)

        blocks = [
            Block(norm(), FusedAttention(shape), norm(), GeluMLP(shape)) for _ in range(shape.num_layers)
        ]
        super().__init__(shape, blocks, norm())
        self.position_embedding = nn.Embedding(shape.context, shape.hidden)

    def embed(self, tokens_bt: Tensor, positions_bt: Tensor) -> Tensor:
        x_btd: Tensor = self.embedding(tokens_bt) + self.position_embedding(positions_bt)
        return x_btd
