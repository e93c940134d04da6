"""OLMo 2: Llama with norms after each sublayer instead of before it, and RMSNorm of all queries and all keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rush.models.families.family import Config, Fields, Structure
from rush.models.families.llama_like import (
    NAMES,
    QK_NORM_NAMES,
    llama_like,
    read_dims,
    read_one_rope,
    write_llama_like,
)

if TYPE_CHECKING:
    from rush.models.shape import Shape


def _read(config: Config) -> Fields:
    return read_dims(config, norm_eps=1e-5) | read_one_rope(config)


def _write(shape: Shape) -> dict[str, Any]:
    return write_llama_like(shape) | {"pad_token_id": None}


_OWN = {
    **NAMES,
    **QK_NORM_NAMES,
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}

FAMILY = llama_like(
    "olmo2",
    "OLMo 2",
    "Olmo2",
    _write,
    read=_read,
    structure=Structure(norm_position="after", norm_rounds_last=True, qk_norm="width"),
    names={ours: theirs for ours, theirs in _OWN.items() if ours not in ("attention_norm", "mlp_norm")},
)
