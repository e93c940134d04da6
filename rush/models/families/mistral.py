"""Mistral: Llama with a sliding window in every layer (7B v0.1), or without one (later versions)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rush.models.families.family import Config, Fields
from rush.models.families.llama_like import ONE_BIAS, llama_like, read_dims, read_one_rope, write_llama_like

if TYPE_CHECKING:
    from rush.models.shape import Shape


def _read(config: Config) -> Fields:
    dims = read_dims(config, defaults={"num_key_value_heads": 8})
    # Without the key the library assumes a window; null means none.
    return dims | read_one_rope(config) | {"window": config.get("sliding_window", 4096)}


def _write(shape: Shape) -> dict[str, Any]:
    return write_llama_like(shape) | {"sliding_window": shape.window}


FAMILY = llama_like(
    "mistral", "Mistral", "Mistral", _write, read=_read, supported={**ONE_BIAS, "layer_types": (None,)}
)
