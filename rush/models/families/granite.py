"""Granite 3 (dense): Llama with a multiplier of embeddings, of what sublayers add, of scores, and a divisor of logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rush.models.families.family import Config, Fields
from rush.models.families.llama_like import NO_BIASES, llama_like, read_llama, write_llama_like
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
    return read_llama(config) | multipliers


def _write(shape: Shape) -> dict[str, Any]:
    scale = shape.head_dim**-0.5 if shape.attention_scale is None else shape.attention_scale
    return write_llama_like(shape) | {
        "mlp_bias": False,
        "embedding_multiplier": 1.0 if shape.embedding_scale is None else shape.embedding_scale,
        "residual_multiplier": 1.0 if shape.residual_scale is None else shape.residual_scale,
        "attention_multiplier": scale,
        "logits_scaling": 1.0 if shape.logit_divisor is None else shape.logit_divisor,
    }


FAMILY = llama_like("granite", "Granite 3", "Granite", _write, read=_read, supported=NO_BIASES)
