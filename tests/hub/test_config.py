from __future__ import annotations

from typing import Any

import pytest

from rush.errors import DataError
from rush.hub.config import config_from_shape, shape_from_config
from rush.models import SIZES, LinearRopeScaling, RopeScaling, Shape

# The settings of the published files, as far as they decide the model.
PUBLISHED_GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "layer_norm_epsilon": 1e-05,
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
PUBLISHED_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def test_the_published_configurations_give_the_published_shapes() -> None:
    assert shape_from_config(PUBLISHED_GPT2) == SIZES["gpt2-124m"]
    assert shape_from_config(PUBLISHED_LLAMA) == SIZES["llama-3.2-1b"]


def test_both_spellings_of_rope_settings_are_read() -> None:
    scaling, theta = PUBLISHED_LLAMA["rope_scaling"], PUBLISHED_LLAMA["rope_theta"]
    bare = {key: value for key, value in PUBLISHED_LLAMA.items() if not key.startswith("rope_")}
    assert isinstance(scaling, dict)
    new = bare | {"rope_parameters": scaling | {"rope_theta": theta}}
    oldest = bare | {
        "rope_theta": theta,
        "rope_scaling": {"type" if k == "rope_type" else k: v for k, v in scaling.items()},
    }
    assert shape_from_config(new) == shape_from_config(oldest) == SIZES["llama-3.2-1b"]
    plain = shape_from_config(bare | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}})
    assert (plain.rope_theta, plain.rope_scaling) == (7.0, None)
    assert shape_from_config(bare).rope_theta == 10000.0
    assert shape_from_config(bare | {"rope_theta": 9.0, "rope_scaling": None}).rope_theta == 9.0


def test_defaults_follow_the_reference_library() -> None:
    import transformers

    few = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    few |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 16}
    theirs = transformers.LlamaConfig(**{key: value for key, value in few.items() if key != "model_type"})
    ours = shape_from_config(few)
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == theirs.head_dim
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tied_head == theirs.tie_word_embeddings
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    gpt2 = transformers.GPT2Config()
    assert shape_from_config(gpt2.to_dict()) == SIZES["gpt2-124m"]


@pytest.mark.parametrize("name", SIZES)
def test_a_configuration_and_back_is_the_same_shape(name: str) -> None:
    assert shape_from_config(config_from_shape(SIZES[name])) == SIZES[name]


def test_small_shapes_and_back_are_the_same(small_shape: Shape) -> None:
    config = config_from_shape(small_shape, dtype="bfloat16", bos_id=1, eos_id=2)
    assert shape_from_config(config) == small_shape
    assert (config["dtype"], config["torch_dtype"]) == ("bfloat16", "bfloat16")
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


LLAMA3 = PUBLISHED_LLAMA["rope_scaling"]


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (PUBLISHED_LLAMA, {"model_type": "qwen"}, ("model_type", "'qwen'", "did you mean 'qwen")),
        (PUBLISHED_LLAMA, {"model_type": "mamba"}, ("model_type", "mamba", "gpt2, granite, llama")),
        (PUBLISHED_LLAMA, {"model_type": None}, ("model_type",)),
        (PUBLISHED_LLAMA, {"model_type": ["llama"]}, ("model_type",)),
        (
            PUBLISHED_LLAMA,
            {"architectures": ["LlamaForSequenceClassification"]},
            ("architectures", "LlamaForCausalLM"),
        ),
        (PUBLISHED_GPT2, {"architectures": ["GPT2DoubleHeadsModel"]}, ("architectures", "GPT2LMHeadModel")),
        (PUBLISHED_LLAMA, {"attention_bias": True}, ("attention_bias", "True")),
        (PUBLISHED_LLAMA, {"mlp_bias": True}, ("mlp_bias",)),
        (PUBLISHED_LLAMA, {"hidden_act": "gelu"}, ("hidden_act", "gelu", "silu")),
        (PUBLISHED_LLAMA, {"partial_rotary_factor": 0.5}, ("partial_rotary_factor", "0.5")),
        (PUBLISHED_LLAMA, {"quantization_config": {"bits": 4}}, ("quantization_config",)),
        (
            PUBLISHED_LLAMA,
            {"rope_scaling": {"rope_type": "proportional", "factor": 4.0}},
            ("rope_type", "proportional", "llama3"),
        ),
        (PUBLISHED_LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ("rope_type", "dynamic")),
        (PUBLISHED_LLAMA, {"rope_scaling": {"type": "linear"}}, ("linear RoPE scaling lacks factor",)),
        (PUBLISHED_LLAMA, {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ("low_freq_factor",)),
        (PUBLISHED_LLAMA, {"rope_scaling": "llama3"}, ("rope_scaling", "JSON object")),
        (
            PUBLISHED_LLAMA,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
            ("rope_parameters",),
        ),
        (PUBLISHED_LLAMA, {"rope_theta": [1.0]}, ("rope_theta",)),
        (
            PUBLISHED_LLAMA,
            {"rope_parameters": {**LLAMA3, "rope_theta": 1.0}},
            ("rope_theta", "500000.0", "1.0"),
        ),
        (PUBLISHED_LLAMA, {"num_key_value_heads": 5}, ("num_kv_heads", "5")),
        (PUBLISHED_LLAMA, {"hidden_size": None}, ("hidden_size",)),
        (PUBLISHED_LLAMA, {"hidden_size": "2048"}, ("hidden_size", "whole number")),
        (PUBLISHED_LLAMA, {"tie_word_embeddings": "yes"}, ("tie_word_embeddings",)),
        (PUBLISHED_GPT2, {"activation_function": "relu"}, ("activation_function", "relu", "gelu_new")),
        (PUBLISHED_GPT2, {"scale_attn_weights": False}, ("scale_attn_weights",)),
        (PUBLISHED_GPT2, {"scale_attn_by_inverse_layer_idx": True}, ("scale_attn_by_inverse_layer_idx",)),
        (PUBLISHED_GPT2, {"reorder_and_upcast_attn": True}, ("reorder_and_upcast_attn",)),
        (PUBLISHED_GPT2, {"add_cross_attention": True}, ("add_cross_attention",)),
        (PUBLISHED_GPT2, {"n_head": 11}, ("num_heads", "11")),
        (PUBLISHED_GPT2, {"n_layer": 0}, ("num_layers", "0")),
        (PUBLISHED_GPT2, {"n_head": 0}, ("num_heads", "0")),
    ],
)
def test_unsupported_settings_are_refused_by_name(
    base: dict[str, Any], changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(DataError) as caught:
        shape_from_config(base | changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_linear_rope_scaling_is_read_and_written(spelling: str) -> None:
    shape = shape_from_config(PUBLISHED_LLAMA | {"rope_scaling": {spelling: "linear", "factor": 4.0}})
    assert shape.rope_scaling == LinearRopeScaling(4.0)
    written = config_from_shape(shape)
    assert written["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert shape_from_config(written) == shape


def test_both_spellings_may_occur_if_they_agree() -> None:
    both = config_from_shape(SIZES["llama-3.1-8b"])
    assert both["rope_scaling"]
    assert both["rope_parameters"]
    assert shape_from_config(both).rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
