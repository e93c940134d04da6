"""Gemma 3, its text model: Gemma 2 with RMSNorm of queries and keys instead of soft caps, five layers with a window for each
without, and another theta in those with one.

The published configs of 4B and more also have a vision tower; its weights are not read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rush.models.families.family import Config, Family, Fields
from rush.models.families.gemma2 import GEMMA_NAMES, STRUCTURE, SUPPORTED, read_gemma, write_gemma
from rush.models.families.llama_like import QK_NORM_NAMES
from rush.models.families.settings import (
    FULL,
    SLIDING,
    layer_kinds,
    number,
    real,
    refuse,
    rope_table,
    scaling_table,
)

if TYPE_CHECKING:
    from rush.models.shape import Shape

DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
}


def _read(config: Config) -> Fields:
    # With its vision tower, the text model is a table of its own.
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        refuse("text_config", text, "it must be a JSON object")
    found = read_gemma(text, (None, None), DEFAULTS)
    layers = found["num_layers"]
    period = number(text, "sliding_window_pattern", default=6)
    windowed = layer_kinds(text, layers, ((layer + 1) % period != 0 for layer in range(layers)))
    return found | _read_ropes(text) | {"window_layers": windowed}


def _read_ropes(config: Config) -> Fields:
    """RoPE of layers without and with a window: two tables, or in older configs two thetas and one scaling."""
    tables, old = config.get("rope_parameters"), config.get("rope_scaling")
    for key, value in (("rope_parameters", tables), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            refuse(key, value, "it must be a JSON object")
    whole, local = ((tables or {}).get(kind) or {} for kind in (FULL, SLIDING))
    if local and rope_table(local, config) is not None:
        refuse("rope_parameters", local, f"{SLIDING} layers must have the default rope_type")
    return {
        "rope_theta": real(whole, "rope_theta", real(config, "rope_theta", 1_000_000.0)),
        "local_rope_theta": real(local, "rope_theta", real(config, "rope_local_base_freq", 10_000.0)),
        "rope_scaling": rope_table(whole or old or {}, config),
    }


def _write(shape: Shape) -> dict[str, Any]:
    table, pattern = scaling_table(shape.rope_scaling), shape.window_layers
    local = {"rope_type": "default", "rope_theta": shape.local_rope_theta}
    period = len(pattern) if pattern == (*(True,) * (len(pattern) - 1), False) else None
    return (
        write_gemma(shape)
        | {
            "rope_theta": shape.rope_theta,
            "rope_local_base_freq": shape.local_rope_theta,
            "rope_scaling": None if shape.rope_scaling is None else table,
            "rope_parameters": {FULL: table | {"rope_theta": shape.rope_theta}, SLIDING: local},
        }
        | ({"sliding_window_pattern": period} if period else {})
    )


FAMILY = Family(
    name="gemma3_text",
    title="Gemma 3 (text)",
    also=("gemma3",),
    architecture="Gemma3ForCausalLM",
    accepted=("Gemma3TextModel", "Gemma3ForConditionalGeneration"),
    structure=replace(STRUCTURE, qk_norm="head"),
    read=_read,
    write=_write,
    names={**GEMMA_NAMES, **QK_NORM_NAMES},
    supported=SUPPORTED,
    prefixes=("model.", "language_model.model.", "model.language_model.", "language_model."),
    ignored=("vision_tower.", "multi_modal_projector."),
)
