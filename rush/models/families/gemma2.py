"""Gemma 2: norms before and after each sublayer with 1 + weight, windows in every other layer, soft caps, gated GELU,
embeddings times sqrt(hidden)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rush.models.families.family import Config, Family, Fields, Structure
from rush.models.families.llama_like import NAMES, read_dims, read_one_rope, write_dims
from rush.models.families.settings import layer_kinds, layer_types, real, write_rope

if TYPE_CHECKING:
    from rush.models.shape import Shape

STRUCTURE = Structure(
    norm_position="both",
    norm_offset=True,
    activation="gelu",
    embedding_by_width=True,
)
GEMMA_NAMES: Mapping[str, str] = {
    **NAMES,
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh", None),
    "attention_bias": (False,),
    "use_bidirectional_attention": (None, False),
}
DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
}


def read_gemma(
    config: Config, caps: tuple[float | None, float | None], defaults: Mapping[str, int]
) -> Fields:
    """What Gemma 2 and 3 share; `caps` are the defaults of the soft caps of attention and logits."""
    dims = read_dims(config, tied_head=True, defaults=defaults)
    scale = (real(config, "query_pre_attn_scalar") or 256.0) ** -0.5
    return dims | {
        "attention_scale": scale,
        "attention_softcap": real(config, "attn_logit_softcapping", caps[0]),
        "logit_softcap": real(config, "final_logit_softcapping", caps[1]),
        "window": config.get("sliding_window", 4096),
    }


def write_gemma(shape: Shape) -> dict[str, Any]:
    windowed = [shape.is_local(layer) for layer in range(shape.num_layers)]
    scalar = shape.head_dim if shape.attention_scale is None else shape.attention_scale**-2
    return write_dims(shape) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 else scalar,
        "attn_logit_softcapping": shape.attention_softcap,
        "final_logit_softcapping": shape.logit_softcap,
        "sliding_window": shape.window if shape.window is not None else shape.context,
        "layer_types": layer_types(windowed),
        "pad_token_id": None,
    }


def _read(config: Config) -> Fields:
    found = read_gemma(config, (50.0, 30.0), DEFAULTS)
    layers = found["num_layers"]
    windowed = layer_kinds(config, layers, (layer % 2 == 0 for layer in range(layers)))
    return found | read_one_rope(config) | {"window_layers": windowed}


def _write(shape: Shape) -> dict[str, Any]:
    return write_gemma(shape) | write_rope(shape.rope_theta, shape.rope_scaling)


FAMILY = Family(
    name="gemma2",
    title="Gemma 2",
    architecture="Gemma2ForCausalLM",
    accepted=("Gemma2Model",),
    structure=STRUCTURE,
    read=_read,
    write=_write,
    names=GEMMA_NAMES,
    supported=SUPPORTED,
)
