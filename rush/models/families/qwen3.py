"""Qwen 3 (dense): Llama with RMSNorm of each head's queries and keys, and an explicit head dim."""

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
from rush.models.families.qwen2 import read_windows, write_windows

if TYPE_CHECKING:
    from rush.models.shape import Shape


def _read(config: Config) -> Fields:
    dims = read_dims(config, defaults={"num_key_value_heads": 32, "head_dim": 128})
    return dims | read_one_rope(config) | read_windows(config, dims["num_layers"])


def _write(shape: Shape) -> dict[str, Any]:
    return write_llama_like(shape) | write_windows(shape)


FAMILY = llama_like(
    "qwen3",
    "Qwen 3",
    "Qwen3",
    _write,
    read=_read,
    structure=Structure(qk_norm="head"),
    names={**NAMES, **QK_NORM_NAMES},
)
