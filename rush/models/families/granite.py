"""Granite 3 (dense): Llama with a multiplier of embeddings, of what sublayers add, of scores, and a divisor of logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rush.models.families.family import Config, Family, Fields
from rush.models.families.llama_like import (
    NAMES,
    NO_BIASES,
    SILU,
    read_dims,
    read_one_rope,
    write_llama_like,
)
from rush.models.families.settings import real

if TYPE_CHECKING:
    from rush.models.shape import Shape


def _read(config: Config) -> Fields:
    multipliers = {
        "embedding_scale": real(config, "embedding_multiplier", 1.0),
        "residual_scale": real(config, "residual_multiplier", 1.0),
        "attention_scale": real(config, "attention_multiplier", 1.0),
        "logit_divisor": real(config, "logits_scaling", 1.0),
    }
    return read_dims(config) | read_one_rope(config) | multipliers


def _write(shape: Shape) -> dict[str, Any]:
    scale = shape.head_dim**-0.5 if shape.attention_scale is None else shape.attention_scale
    return write_llama_like(shape) | {
        "mlp_bias": False,
        "embedding_multiplier": 1.0 if shape.embedding_scale is None else shape.embedding_scale,
        "residual_multiplier": 1.0 if shape.residual_scale is None else shape.residual_scale,
        "attention_multiplier": scale,
        "logits_scaling": 1.0 if shape.logit_divisor is None else shape.logit_divisor,
    }


FAMILY = Family(
    name="granite",
    title="Granite 3",
    architecture="GraniteForCausalLM",
    accepted=("GraniteModel",),
    read=_read,
    write=_write,
    names=NAMES,
    supported={"hidden_act": SILU, **NO_BIASES},
)
