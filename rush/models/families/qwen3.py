"""Qwen 3 (dense): Llama with RMSNorm of each head's queries and keys, and an explicit head dim."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rush.models.families.family import Config, Family, Fields, Structure
from rush.models.families.llama_like import (
    NAMES,
    QK_NORM_NAMES,
    SILU,
    read_dims,
    read_one_rope,
    write_llama_like,
)
from rush.models.families.qwen2 import read_windows, write_windows

if TYPE_CHECKING:
    from rush.models.shape import Shape


def _read(config: Config) -> Fields:
    dims = read_dims(config, defaults={"num_key_value_heads": 32, "head_dim": 128})
    return dims | read_one_rope(config) | read_windows(config, dims["num_layers"])


def _write(shape: Shape) -> dict[str, Any]:
    return write_llama_like(shape) | write_windows(shape)


FAMILY = Family(
    name="qwen3",
    title="Qwen 3",
    architecture="Qwen3ForCausalLM",
    accepted=("Qwen3Model",),
    structure=Structure(qk_norm="head"),
    read=_read,
    write=_write,
    names={**NAMES, **QK_NORM_NAMES},
    supported={"hidden_act": SILU, "attention_bias": (False,)},
)
