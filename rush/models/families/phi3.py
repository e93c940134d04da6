"""Phi-3 and Phi-4: Llama, stored with one tensor for queries, keys and values and one for gate and up; LongRoPE, and in
Phi-4-mini RoPE on three quarters of each head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rush.models.families.family import Config, Fields
from rush.models.families.llama_like import llama_like, read_dims, write_llama_like
from rush.models.families.settings import read_rope, real, refuse
from rush.models.rope_scaling import LongRopeScaling

if TYPE_CHECKING:
    from rush.models.shape import Shape


def _read(config: Config) -> Fields:
    dims = read_dims(config, norm_eps=1e-5)
    tables = (config.get("rope_parameters"), config, config.get("rope_scaling"))
    factors = [real(table, "partial_rotary_factor") for table in tables if isinstance(table, dict)]
    factor = next((found for found in factors if found is not None), 1.0)
    theta, scaling = read_rope(config)
    if scaling is not None and not isinstance(scaling, LongRopeScaling):
        refuse("rope_scaling", config.get("rope_scaling"), "supported for phi3 is longrope, or none")
    if not 0 < factor <= 1:
        refuse("partial_rotary_factor", factor, "it must be above 0 and at most 1")
    return dims | {
        "window": config.get("sliding_window"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rotary_dim": int(dims["head_dim"] * factor),
    }


def _write(shape: Shape) -> dict[str, Any]:
    found = write_llama_like(shape)
    rotated = shape.rotary_dim or shape.head_dim
    factor = rotated / shape.head_dim
    if int(shape.head_dim * factor) != rotated:  # it is rounded down where it is read
        factor = (rotated + 0.5) / shape.head_dim
    scaling = shape.rope_scaling
    original = scaling.original_context if isinstance(scaling, LongRopeScaling) else shape.context
    found["rope_parameters"] |= {"partial_rotary_factor": factor}
    return found | {
        "sliding_window": shape.window,
        "partial_rotary_factor": factor,
        "original_max_position_embeddings": original,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "pad_token_id": None,
    }


FAMILY = llama_like(
    "phi3",
    "Phi-3 and Phi-4",
    "Phi3",
    _write,
    read=_read,
    joined={
        "self_attn.qkv_proj": ("attention.q", "attention.k", "attention.v"),
        "mlp.gate_up_proj": ("mlp.gate", "mlp.up"),
    },
)
