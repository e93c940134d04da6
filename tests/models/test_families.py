"""Families as data: every one reads and writes its config, and every planted difference shows in the logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rush.errors import DataError, RecipeError
from rush.hub.config import config_from_shape, shape_from_config
from rush.hub.weights import load_hf_folder, save_hf_folder
from rush.models import SIZES, Decoder, LongRopeScaling, Shape, build_model
from rush.models.families import FAMILIES
from rush.sampling import generate
from tests.models.small_models import FAMILY_SHAPES, SMALL_SHAPES

Lively = Callable[[Shape], Decoder]
Rows = Callable[[int, int], torch.Tensor]


def test_every_family_has_a_tiny_size_and_an_odd_shape_in_the_tests() -> None:
    assert {shape.family for name, shape in SIZES.items() if name.endswith("tiny")} == {*FAMILIES}
    assert {shape.family for shape in SMALL_SHAPES.values()} == {*FAMILIES}


# What a reader of a config might get wrong. Each must be seen in the logits, or the comparison with transformers proves nothing.
PLANTED: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"window": 12}),
    ("mistral", {"window": 10}),
    ("qwen2-windows", {"window_layers": (True, True, False)}),
    ("gemma2", {"window_layers": (False, True)}),
    ("gemma2", {"attention_softcap": None}),
    ("gemma2", {"logit_softcap": None}),
    ("gemma2", {"attention_scale": None}),
    ("gemma3", {"local_rope_theta": 10000.0}),
    ("gemma3", {"rope_scaling": None}),
    ("phi3-partial-long", {"rotary_dim": 6, "rope_scaling": None}),
    ("granite", {"embedding_scale": None}),
    ("granite", {"residual_scale": None}),
    ("granite", {"logit_divisor": None}),
    ("granite", {"attention_scale": None}),
    ("smollm3", {"rope_layers": (True,)}),
    ("mistral-yarn", {"rope_scaling": None}),
]


@pytest.mark.parametrize(("name", "changes"), PLANTED)
def test_a_planted_difference_changes_the_logits(
    name: str, changes: dict[str, Any], lively: Lively, text_tokens: Rows
) -> None:
    model, tokens = lively(SMALL_SHAPES[name]), text_tokens(1, 40)
    other = build_model(replace(SMALL_SHAPES[name], **changes))
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        right, wrong = model(tokens), other(tokens)
    assert float((right - wrong).abs().max() / right.abs().max()) > 1e-3


@pytest.mark.parametrize(
    "replaced",
    [
        "attention.q_norm",
        "attention.k_norm",
        "attention_post_norm",
        "mlp_post_norm",
        "attention_norm",
        "mlp_norm",
    ],
)
def test_every_norm_of_gemma_3_matters(replaced: str, lively: Lively, text_tokens: Rows) -> None:
    model, tokens = lively(SMALL_SHAPES["gemma3"]), text_tokens(1, 20)
    with torch.no_grad():
        right = model(tokens)
        owner, _, own = f"blocks.1.{replaced}".rpartition(".")
        setattr(model.get_submodule(owner), own, torch.nn.Identity())
        wrong = model(tokens)
    assert float((right - wrong).abs().max() / right.abs().max()) > 1e-3


@pytest.mark.parametrize("name", FAMILY_SHAPES)
def test_generation_with_a_cache_equals_full_forward_passes(
    name: str, lively: Lively, text_tokens: Rows
) -> None:
    """Past the windows, and past the length where LongRoPE changes its angles."""
    model, prompt = lively(SMALL_SHAPES[name]).eval(), text_tokens(1, 17)[0].tolist()
    drawn = list(generate(model, prompt, max_new_tokens=14, temperature=0, prefill_tokens=5))
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(14):
            tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    assert drawn == tokens[len(prompt) :]


@pytest.mark.parametrize("factor", [None, 2.0])
def test_embeddings_are_scaled_in_the_dtype_of_the_weights(factor: float | None) -> None:
    import transformers

    config = config_from_shape(SIZES["gemma3-tiny"])
    theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    theirs = theirs.to(torch.bfloat16)
    ours = build_model(SIZES["gemma3-tiny"]).to(torch.bfloat16)
    with torch.no_grad():
        ours.embedding.weight.copy_(theirs.model.embed_tokens.weight * (factor or 1.0))
        theirs.model.embed_tokens.weight.mul_(factor or 1.0)
    tokens = torch.arange(50)[None]
    assert torch.equal(ours.embed(tokens, tokens), theirs.model.embed_tokens(tokens))


def test_a_gemma_3_with_its_vision_tower_is_read_as_its_text_model(lively: Lively, tmp_path: Path) -> None:
    import json

    from safetensors.torch import load_file, save_file

    shape = SMALL_SHAPES["gemma3"]
    model = lively(shape)
    save_hf_folder(tmp_path, model, shape)
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    whole |= {"text_config": text, "vision_config": {"hidden_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    tensors = load_file(tmp_path / "model.safetensors")
    named = {f"language_model.{name}": value for name, value in tensors.items()}
    named |= {"vision_tower.patch.weight": torch.ones(2), "multi_modal_projector.weight": torch.ones(2)}
    save_file(named, tmp_path / "model.safetensors")
    found, state = load_hf_folder(tmp_path)
    assert found == shape
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


def test_one_stored_tensor_holds_several_of_phi_3(lively: Lively, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    shape = SMALL_SHAPES["phi3"]
    model = lively(shape)
    save_hf_folder(tmp_path, model, shape)
    stored = load_file(tmp_path / "model.safetensors")
    attention = model.blocks[1].get_submodule("attention")
    rows = torch.cat([attention.get_submodule(name).weight for name in "qkv"])  # type: ignore[misc]
    assert torch.equal(stored["model.layers.1.self_attn.qkv_proj.weight"], rows)
    assert "model.layers.1.self_attn.q_proj.weight" not in stored


# --- configs -------------------------------------------------------------------------------------------------

PUBLISHED_QWEN3 = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960,
    "max_window_layers": 28, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
PUBLISHED_GEMMA3 = {
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "head_dim": 256,
    "attn_logit_softcapping": None, "cache_implementation": "hybrid", "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912,
    "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
}  # fmt: skip
PUBLISHED_MISTRAL = {
    "model_type": "mistral", "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
    "tie_word_embeddings": False, "vocab_size": 32000,
}  # fmt: skip


def test_published_configs_give_the_published_shapes() -> None:
    assert shape_from_config(PUBLISHED_QWEN3) == SIZES["qwen3-0.6b"]
    assert shape_from_config(PUBLISHED_GEMMA3) == SIZES["gemma-3-1b"]
    assert shape_from_config(PUBLISHED_MISTRAL) == SIZES["mistral-7b"]
    without = shape_from_config(PUBLISHED_MISTRAL | {"sliding_window": None})
    assert without == replace(SIZES["mistral-7b"], window=None)


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (PUBLISHED_QWEN3, {"attention_bias": True}, ("attention_bias",)),
        (PUBLISHED_QWEN3, {"hidden_act": "gelu"}, ("hidden_act", "silu")),
        (PUBLISHED_QWEN3, {"layer_types": ["linear_attention"] * 28}, ("layer_types", "28 layers")),
        (PUBLISHED_QWEN3, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ("dynamic", "null")),
        (PUBLISHED_GEMMA3, {"use_bidirectional_attention": True}, ("use_bidirectional_attention",)),
        (PUBLISHED_GEMMA3, {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2}}},
         ("sliding_attention", "default")),
        (PUBLISHED_GEMMA3, {"text_config": 3}, ("text_config", "JSON object")),
        (PUBLISHED_MISTRAL, {"sliding_window": 0}, ("window", "0")),
        (PUBLISHED_MISTRAL, {"sliding_window": "wide"}, ("window", "wide")),
    ],
)  # fmt: skip
def test_what_a_family_does_not_support_is_refused_by_name(
    base: dict[str, Any], changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(DataError) as caught:
        shape_from_config(base | changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_equal_models_have_equal_shapes() -> None:
    base = SIZES["mistral-tiny"]
    assert replace(base, window=512) == replace(base, window=None)
    assert replace(base, window_layers=(True, True, True, True)) == base
    assert replace(base, attention_scale=base.head_dim**-0.5) == base
    assert replace(SIZES["gemma-3-1b"], num_layers=12).window_layers == (True,) * 5 + (False,)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("mistral-tiny", {"window": -1}, ("window", "-1")),
        ("gemma2-tiny", {"attention_softcap": 0.0}, ("attention_softcap", "0.0")),
        ("phi3-tiny", {"rotary_dim": 25}, ("rotary_dim", "even")),
        ("phi3-tiny", {"rotary_dim": 34}, ("rotary_dim", "34")),
        ("phi3-tiny", {"rope_scaling": LongRopeScaling((1.0,), (1.0,), 8)}, ("6 frequencies",)),
        ("smollm3-tiny", {"rope_layers": ()}, ("rope_layers",)),
    ],
)
def test_an_impossible_shape_is_refused(name: str, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError) as caught:
        replace(SIZES[name], **changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_page_about_families_is_current() -> None:
    import importlib.util

    root = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location("family_page", root / "scripts" / "family_page.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert (root / "docs" / "families.md").read_text(encoding="utf-8") == script.page(), (
        "run scripts/family_page.py"
    )
