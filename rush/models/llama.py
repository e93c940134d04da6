"""Llama and the families that vary it: RMSNorm, RoPE, grouped-query attention (GQA), a gated MLP.

RoPE rotates queries and keys, so that a score depends on the distance of two tokens. With GQA several query heads share one
key/value head: the KV cache and its traffic shrink by that factor, the number of scores does not. Small models tie the LM
head to the embedding, larger ones do not. Everything else that a family adds (norms of queries and keys, norms after sublayers,
windows, caps) is a part that is there or not; a Llama has none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from rush.models.decoder import Block, Decoder
from rush.models.layers import FanOut, GatedMLP, LayerCache, PlainAttention, rms_norm
from rush.models.rotary import PlainRotate, Rotary
from rush.models.shape import Shape


class GroupedAttention(nn.Module):
    """Grouped-query attention with separate query, key and value layers, and RoPE."""

    def __init__(self, shape: Shape, layer: int = 0) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.form = shape.attention_form(layer)
        query_width, key_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        bias = shape.qkv_biases
        self.q = nn.Linear(shape.hidden, query_width, bias=bias)
        self.k = nn.Linear(shape.hidden, key_width, bias=bias)
        self.v = nn.Linear(shape.hidden, key_width, bias=bias)
        self.fan_out: nn.Module = FanOut()
        self.qk_norm = shape.qk_norm
        if self.qk_norm != "none":
            heads = self.qk_norm == "head"
            self.q_norm: nn.Module = rms_norm(shape, shape.head_dim if heads else query_width)
            self.k_norm: nn.Module = rms_norm(shape, shape.head_dim if heads else key_width)
        self.rotate: nn.Module = PlainRotate()
        self.core: nn.Module = PlainAttention(self.form)
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
        # (One name for each: what is no longer needed is freed.)
        q, k, v = self.fan_out(x_btd, self.q, self.k, self.v)
        if self.qk_norm == "width":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if rotary is not None:
            q, k = self.rotate(q, k, *rotary)
        if cache is not None:
            k, v = cache.extend(k, v, query_offset)
        o_bhtd = self.core(q, k, v, documents=documents, query_offset=query_offset)
        out: Tensor = self.out(o_bhtd.transpose(1, 2).flatten(2))
        return out


class Llama(Decoder):
    """The Llama family, and all that vary it."""

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
        super().__init__(
            shape, [_block(shape, layer) for layer in range(shape.num_layers)], rms_norm(shape, shape.hidden)
        )
        width = shape.rotary_dim or shape.head_dim
        self.rotary = Rotary(width, shape.rope_theta, shape.rope_scaling)
        if shape.local_rope_theta is not None:
            self.local_rotary = Rotary(width, shape.local_rope_theta, None)


def _block(shape: Shape, layer: int) -> Block:
    def norm(wanted: bool) -> nn.Module | None:
        return rms_norm(shape, shape.hidden) if wanted else None

    before, after = shape.norms_before, shape.norms_after
    return Block(
        norm(before) or nn.Identity(),
        GroupedAttention(shape, layer),
        norm(before) or nn.Identity(),
        GatedMLP(shape),
        attention_post_norm=norm(after),
        mlp_post_norm=norm(after),
        residual_scale=shape.residual_scale,
    )
