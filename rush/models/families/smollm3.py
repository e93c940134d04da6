"""SmolLM 3: Llama with every fourth layer without RoPE."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rush.models.families.family import Config, Fields
from rush.models.families.llama_like import NO_BIASES, llama_like, read_dims, read_one_rope, write_llama_like
from rush.models.families.settings import flag, layer_kinds, layer_types, number, refuse

if TYPE_CHECKING:
    from rush.models.shape import Shape


def _read(config: Config) -> Fields:
    dims = read_dims(config, tied_head=True, defaults={"num_key_value_heads": 4})
    layers = dims["num_layers"]
    every = number(config, "no_rope_layer_interval", default=4)
    rotated = config.get("no_rope_layers") or [int((layer + 1) % every != 0) for layer in range(layers)]
    if not isinstance(rotated, list) or len(rotated) < layers or not set(rotated) <= {0, 1}:
        refuse("no_rope_layers", rotated, "it must list 0 (without RoPE) or 1 for each layer")
    fields = dims | read_one_rope(config, 2_000_000.0)
    fields["rope_layers"] = tuple(bool(one) for one in rotated[:layers])
    windowed = layer_kinds(config, layers, (not one for one in fields["rope_layers"]))
    if flag(config, "use_sliding_window", default=False) and config.get("sliding_window") and any(windowed):
        fields |= {"window": config["sliding_window"], "window_layers": windowed}
    return fields


def _write(shape: Shape) -> dict[str, Any]:
    windowed = [shape.window_of(layer) is not None for layer in range(shape.num_layers)]
    return write_llama_like(shape) | {
        "mlp_bias": False,
        "no_rope_layers": [int(shape.rotates(layer)) for layer in range(shape.num_layers)],
        "use_sliding_window": any(windowed),
        "sliding_window": shape.window,
        "layer_types": layer_types(windowed),
        "pad_token_id": None,
    }


FAMILY = llama_like("smollm3", "SmolLM 3", "SmolLM3", _write, read=_read, supported=NO_BIASES)
