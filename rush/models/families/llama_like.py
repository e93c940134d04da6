"""Shared by the variants of Llama: settings with the same names, and weights with the same names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rush.models.families.family import Config, Family, Fields
from rush.models.families.settings import flag, number, read_rope, refuse, write_rope

if TYPE_CHECKING:
    from rush.models.shape import Shape

NAMES: Mapping[str, str] = {
    "embedding": "embed_tokens",
    "blocks": "layers",
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "final_norm": "norm",
}
QK_NORM_NAMES: Mapping[str, str] = {
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
}
SILU = ("silu", "swish")
ONE_BIAS: Mapping[str, tuple[object, ...]] = {"attention_bias": (False,)}
NO_BIASES = {**ONE_BIAS, "mlp_bias": (False,)}


def read_dims(
    config: Config,
    *,
    norm_eps: float = 1e-6,
    tied_head: bool = False,
    defaults: Mapping[str, int] | None = None,
) -> Fields:
    """The dims, with the library's defaults for this family where a config may leave them out."""
    known = defaults or {}

    def dim(name: str) -> int:
        return number(config, name, default=known.get(name))

    hidden, num_heads = dim("hidden_size"), dim("num_attention_heads")
    kv_heads, head_dim = (config.get(key, known.get(key)) for key in ("num_key_value_heads", "head_dim"))
    return {
        "vocab_size": dim("vocab_size"),
        "context": dim("max_position_embeddings"),
        "hidden": hidden,
        "num_layers": dim("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_heads if kv_heads is None else kv_heads,
        "head_dim": max(1, hidden // max(1, num_heads)) if head_dim is None else head_dim,
        "intermediate": dim("intermediate_size"),
        "norm_eps": config.get("rms_norm_eps", norm_eps),
        "tied_head": flag(config, "tie_word_embeddings", default=tied_head),
    }


def read_one_rope(config: Config, default_theta: float = 10000.0) -> Fields:
    """RoPE with one theta for all layers, of whole heads."""
    for table in (config, config.get("rope_parameters"), config.get("rope_scaling")):
        factor = table.get("partial_rotary_factor", 1.0) if isinstance(table, Mapping) else 1.0
        if factor not in (None, 1.0):
            refuse("partial_rotary_factor", factor, "supported is 1.0")
    theta, scaling = read_rope(config, default_theta)
    return {"rope_theta": theta, "rope_scaling": scaling}


def write_dims(shape: Shape) -> dict[str, Any]:
    return {
        "max_position_embeddings": shape.context,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.norm_eps,
        "attention_dropout": 0.0,
    }


def write_llama_like(shape: Shape) -> dict[str, Any]:
    return write_dims(shape) | {
        "hidden_act": "silu",
        "attention_bias": False,
        **write_rope(shape.rope_theta, shape.rope_scaling),
    }


def read_llama(config: Config) -> Fields:
    return read_dims(config) | read_one_rope(config)


def llama_like(
    name: str,
    title: str,
    architecture: str,
    write: Callable[[Shape], dict[str, Any]],
    *,
    read: Callable[[Config], Fields] = read_llama,
    supported: Mapping[str, tuple[object, ...]] = ONE_BIAS,
    **more: Any,
) -> Family:
    """A family of this kind: its class in transformers is `architecture` + ForCausalLM; `more` are further fields of `Family`."""
    return Family(
        name=name,
        title=title,
        architecture=f"{architecture}ForCausalLM",
        accepted=(f"{architecture}Model",),
        read=read,
        write=write,
        supported={"hidden_act": SILU, **supported},
        **{"names": NAMES, **more},
    )
