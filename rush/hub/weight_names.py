"""Hugging Face's names of our parameters.

GPT-2's linear weights are stored as [in, out], the transpose of nn.Linear's. A file may have the base model's prefix or not
(without it the base model was saved without its head), so files are read by names without the prefix.
"""

from __future__ import annotations

import re

from rush.models.counts import ParameterSpec
from rush.models.shape import Shape

BASE_PREFIX = {"gpt2": "transformer.", "llama": "model."}
_PARTS = {
    "gpt2": {
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
    "llama": {
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
    },
}


def stored_name(shape: Shape, name: str) -> str:
    """A parameter's name in a file, without the base model's prefix."""
    if name == "head.weight":
        return "lm_head.weight"
    parts = _PARTS[shape.family]
    path, kind = name.rsplit(".", 1)
    if match := re.fullmatch(r"blocks\.(\d+)\.(.+)", path):
        return f"{parts['blocks']}.{match[1]}.{parts[match[2]]}.{kind}"
    return f"{parts[path]}.{kind}"


def exported_name(shape: Shape, name: str) -> str:
    """A parameter's name in a file that rush writes, with the prefix."""
    stored = stored_name(shape, name)
    return stored if name == "head.weight" else BASE_PREFIX[shape.family] + stored


def is_transposed(shape: Shape, spec: ParameterSpec) -> bool:
    """Whether a file holds the transpose. The LM head is an nn.Linear there, too."""
    return shape.family == "gpt2" and spec.matmul and spec.role != "head"
