"""GPT-2: learned positions, LayerNorm, GELU, biases, one layer for queries, keys and values, weights stored transposed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rush.models.families.family import Config, Family, Fields, Structure
from rush.models.families.settings import flag, number

if TYPE_CHECKING:
    from rush.models.shape import Shape

_SUPPORTED: Mapping[str, tuple[object, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
}


def _read(config: Config) -> Fields:
    hidden = number(config, "n_embd", "hidden_size")
    num_heads = number(config, "n_head", "num_attention_heads")
    inner = config.get("n_inner")
    return {
        "vocab_size": number(config, "vocab_size"),
        "context": number(config, "n_positions", "max_position_embeddings", "n_ctx"),
        "hidden": hidden,
        "num_layers": number(config, "n_layer", "num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": max(1, hidden // max(1, num_heads)),
        "intermediate": 4 * hidden if inner is None else inner,
        "norm_eps": config.get("layer_norm_epsilon", 1e-5),
        "tied_head": flag(config, "tie_word_embeddings", default=True),
    }


def _write(shape: Shape) -> dict[str, Any]:
    return {
        "n_positions": shape.context,
        "n_ctx": shape.context,
        "n_embd": shape.hidden,
        "n_layer": shape.num_layers,
        "n_head": shape.num_heads,
        "n_inner": None if shape.intermediate == 4 * shape.hidden else shape.intermediate,
        "layer_norm_epsilon": shape.norm_eps,
        # Our models have no dropout; transformers would assume 0.1.
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    } | {key: values[0] for key, values in _SUPPORTED.items()}


FAMILY = Family(
    name="gpt2",
    title="GPT-2",
    architecture="GPT2LMHeadModel",
    accepted=("GPT2Model",),
    structure=Structure(
        norm="layer",
        learned_positions=True,
        joined_qkv=True,
        biases="all",
        gated_mlp=False,
        activation="gelu",
        scaled_outputs=True,
    ),
    read=_read,
    write=_write,
    names={
        "embedding": "wte",
        "position_embedding": "wpe",
        "blocks": "h",
        "attention_norm": "ln_1",
        "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
        "final_norm": "ln_f",
    },
    prefixes=("transformer.",),
    transposed=True,
    supported=_SUPPORTED,
)
