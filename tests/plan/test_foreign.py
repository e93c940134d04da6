"""Plans for any config.json: sizes as published, what is not known named, and the stated error wider by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rush.api import plan_config, plan_recipe
from rush.errors import DataError, RecipeError
from rush.hub.config import config_from_shape
from rush.models import shape_of
from rush.plan.foreign import nearest_shape

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_nextn_predict_layers": 1, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "first_k_dense_replace": 3,
    "max_position_embeddings": 163840,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
}  # fmt: skip
MAMBA = {"model_type": "mamba", "vocab_size": 50280, "hidden_size": 768, "num_hidden_layers": 24, "state_size": 16, "intermediate_size": 1536}  # fmt: skip
PYTHIA = {"model_type": "gpt_neox", "vocab_size": 50304, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 8, "intermediate_size": 8192, "max_position_embeddings": 2048}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters", "within"),
    [(DEEPSEEK_V3, 671e9, 0.02), (MIXTRAL, 46.7e9, 0.01), (PYTHIA, 1.01e9, 0.05)],
    ids=["DeepSeek-V3", "Mixtral 8x7B", "Pythia 1B"],
)
def test_parameters_are_near_the_published_ones(
    config: dict[str, Any], parameters: float, within: float
) -> None:
    assert nearest_shape(config).parameters == pytest.approx(parameters, rel=within)


def test_a_token_passes_as_much_as_is_published() -> None:
    """DeepSeek-V3: 37B of 671B, the embedding's 0.9B and a query of low rank (counted whole) apart."""
    model = nearest_shape(DEEPSEEK_V3)
    assert model.parameters - model.resting == pytest.approx(37e9, rel=0.1)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (DEEPSEEK_V3, ["deepseek_v3", "256 experts, 8 per token", "latent attention", "further tokens"]),
        (MIXTRAL, ["mixtral", "8 experts, 2 per token"]),
        (MAMBA, ["mamba", "no attention heads", "a state instead of attention"]),
        (
            {**PYTHIA, "sliding_window": 512, "is_encoder_decoder": True},
            ["sliding window", "an encoder", "without a gate"],
        ),
        ({"model_type": "seen", "text_config": PYTHIA}, ["other modalities", "gpt_neox"]),
    ],
)
def test_what_is_not_known_is_named(config: dict[str, Any], named: list[str]) -> None:
    said = "; ".join(map(str, nearest_shape(config).doubts))
    assert [word for word in named if word not in said] == []


@pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_without_the_basic_dims_there_is_no_plan(missing: str) -> None:
    config = {key: value for key, value in PYTHIA.items() if key != missing}
    with pytest.raises(DataError, match=rf"no {missing}.*nothing to plan with"):
        nearest_shape(config)


def write(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_supported_family_is_planned_as_its_recipe_is(tmp_path: Path) -> None:
    write(tmp_path, config_from_shape(shape_of("llama-3.1-8b")))
    found = plan_config(tmp_path, "llama-3.1-8b", machine="h200-sxm")
    usual = plan_recipe("llama-3.1-8b", machine="h200-sxm")
    assert found.to_dict() == usual.to_dict() | {"not_known": []}


def test_the_error_grows_by_what_is_not_known(tmp_path: Path) -> None:
    known = write(tmp_path, config_from_shape(shape_of("llama-3.1-8b")))
    plain = plan_config(known / "config.json", "llama-3.1-8b", machine="h200-sxm")
    foreign = plan_config(write(tmp_path, MIXTRAL), "llama-3.1-8b", machine="h200-sxm")
    assert foreign.model is not None
    for what in ("memory", "time"):
        more = sum(getattr(doubt, what) for doubt in foreign.model.doubts)
        assert foreign.expected_error[what] == pytest.approx(plain.expected_error[what] + more)
    assert foreign.memory.parts["experts at rest"] > 32e9 * 8
    assert foreign.to_dict()["not_known"][0]["term"] == "model_type 'mixtral'"


def test_a_sequence_beyond_the_context_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {**PYTHIA, "max_position_embeddings": 512})
    with pytest.raises(RecipeError, match="reads at most 512"):
        plan_config(tmp_path, "llama-3.1-8b", machine="h200-sxm")
