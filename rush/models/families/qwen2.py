"""Qwen 2 and 2.5: Llama with biases on queries, keys and values; sliding windows in the last layers where they are enabled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rush.models.families.family import Config, Fields, Structure
from rush.models.families.llama_like import llama_like, read_dims, read_one_rope, write_llama_like
from rush.models.families.settings import flag, layer_kinds, layer_types, number

if TYPE_CHECKING:
    from rush.models.shape import Shape


def read_windows(config: Config, num_layers: int) -> Fields:
    """Windows where `use_sliding_window` is set: in the layers from `max_window_layers` on, or as `layer_types` lists them."""
    full_first = number(config, "max_window_layers", default=28)
    windowed = layer_kinds(config, num_layers, (layer >= full_first for layer in range(num_layers)))
    enabled = flag(config, "use_sliding_window", default=False) and any(windowed)
    if not enabled:
        return {}
    return {"window": config.get("sliding_window", 4096), "window_layers": windowed}


def write_windows(shape: Shape) -> dict[str, Any]:
    windowed = [shape.window_of(layer) is not None for layer in range(shape.num_layers)]
    return {
        "use_sliding_window": any(windowed),
        "sliding_window": shape.window,
        # How many layers come before the first window: all of them without windows.
        "max_window_layers": windowed.index(True) if any(windowed) else shape.num_layers,
        "layer_types": layer_types(windowed),
    }


def _read(config: Config) -> Fields:
    dims = read_dims(config, defaults={"num_key_value_heads": 32})
    return dims | read_one_rope(config) | read_windows(config, dims["num_layers"])


def _write(shape: Shape) -> dict[str, Any]:
    return write_llama_like(shape) | write_windows(shape) | {"attention_bias": True}


FAMILY = llama_like(
    "qwen2", "Qwen 2 and 2.5", "Qwen2", _write, read=_read, supported={}, structure=Structure(biases="qkv")
)
