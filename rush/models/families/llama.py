"""Llama 2, 3, 3.1, 3.2: RMSNorm, RoPE, grouped-query attention, a gated MLP, no biases."""

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

if TYPE_CHECKING:
    from rush.models.shape import Shape


def _read(config: Config) -> Fields:
    return read_dims(config) | read_one_rope(config)


def _write(shape: Shape) -> dict[str, Any]:
    return write_llama_like(shape) | {"mlp_bias": False, "pretraining_tp": 1}


FAMILY = Family(
    name="llama",
    title="Llama 2 and 3",
    architecture="LlamaForCausalLM",
    accepted=("LlamaModel",),
    read=_read,
    write=_write,
    names=NAMES,
    supported={"hidden_act": SILU, **NO_BIASES},
)
