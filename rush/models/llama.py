"""Llama 3.x: RMSNorm, RoPE, grouped-query attention (GQA), a gated MLP, no biases.

RoPE rotates queries and keys, so that a score depends on the distance of two tokens. With GQA several query heads share one
key/value head: the KV cache and its traffic shrink by that factor, the number of scores does not. Small models tie the LM
head to the embedding, larger ones do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from rush.models.decoder import Block, Decoder
from rush.models.layers import FanOut, GatedMLP, LayerCache, PlainAttention, PlainRotate, RMSNorm, Rotary
from rush.models.shape import Shape


class GroupedAttention(nn.Module):
    """Grouped-query attention with separate query, key and value layers, and RoPE."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        query_width, key_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q = nn.Linear(shape.hidden, query_width, bias=False)
        self.k = nn.Linear(shape.hidden, key_width, bias=False)
        self.v = nn.Linear(shape.hidden, key_width, bias=False)
        self.fan_out: nn.Module = FanOut()
        self.rotate: nn.Module = PlainRotate()
        self.core: nn.Module = PlainAttention()
        self.out = nn.Linear(query_width, shape.hidden, bias=False)

    def forward(
        self,
        x_btd: Tensor,
        *,
        rotary: tuple[Tensor, Tensor] | None = None,
        documents: Any = None,
        cache: LayerCache | None = None,
        query_offset: int = 0,
    ) -> Tensor:
        assert rotary is not None, "Llama's attention needs RoPE's cosines and sines"
        q_bhtd, k_bktd, v_bktd = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in self.fan_out(x_btd, self.q, self.k, self.v)
        )
        q_bhtd, k_bktd = self.rotate(q_bhtd, k_bktd, *rotary)
        if cache is not None:
            k_bktd, v_bktd = cache.extend(k_bktd, v_bktd, query_offset)
        o_bhtd = self.core(q_bhtd, k_bktd, v_bktd, documents=documents, query_offset=query_offset)
        out: Tensor = self.out(o_bhtd.transpose(1, 2).flatten(2))
        return out


class Llama(Decoder):
    """The Llama family."""

    block_linears: ClassVar[Mapping[str, str]] = {
        "q": "attention.q",
        "k": "attention.k",
        "v": "attention.v",
        "attention_out": "attention.out",
        "mlp_gate": "mlp.gate",
        "mlp_up": "mlp.up",
        "mlp_down": "mlp.down",
    }

    def __init__(self, shape: Shape) -> None:
        assert shape.rope_theta is not None

        def norm() -> RMSNorm:
            return RMSNorm(shape.hidden, shape.norm_eps)

        blocks = [
            Block(norm(), GroupedAttention(shape), norm(), GatedMLP(shape)) for _ in range(shape.num_layers)
        ]
        super().__init__(shape, blocks, norm())
        self.rotary = Rotary(shape.head_dim, shape.rope_theta, shape.rope_scaling)
