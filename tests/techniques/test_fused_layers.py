"""Fused norms, rotary positions and MLP activations beyond the walk over all techniques: families, stacks, seams."""

from __future__ import annotations

import pytest
import torch

from rush.errors import MachineError
from rush.hardware import probe
from rush.techniques import check
from rush.techniques.api.evidence import prove
from rush.techniques.kernels.fused_norm import FusedNormBlock
from tests.techniques.tiny_runs import SHORT, compare, make_run, recipe_of, trace

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:mkldnn_matmul failed:UserWarning",
        "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
    )
]
pytest.importorskip("triton", reason="the kernels need Triton")
ALL = ("fused_norm", "fused_rope", "fused_mlp")
SMALL = ["model.shape.num_layers=1", "batch.micro=2", "batch.total_tokens=64"]


def assert_equal_and_proved(
    *techniques: str, name: str = "llama-tiny", dtype: str = "float32", steps: int = 3
) -> None:
    overrides = SHORT if dtype != "float32" else SMALL
    run = make_run(*techniques, name=name, overrides=overrides)
    ours = trace(run, steps, watch=True)
    assert ours.seen is not None
    for technique, proof in prove(run.uses, ours.seen).items():
        assert proof.took_effect, f"{technique}: {proof.what}"
    verdict = compare(run, dtype, ours, trace(make_run(name=name, overrides=overrides), steps))
    assert verdict.verdict == "equal", verdict.why


def test_gpt2_gets_its_own_norm_and_activation() -> None:
    assert_equal_and_proved("fused_norm", "fused_mlp", name="tiny")
    seen = trace(make_run("fused_norm", "fused_mlp", name="tiny", overrides=SMALL), 1, watch=True).seen
    assert seen is not None
    assert {"rush::add_layernorm_backward", "rush::gelu_backward"} <= set(seen.ops)
    assert not [name for name in seen.ops if "rmsnorm" in name or "swiglu" in name]
    assert not {"aten::native_layer_norm", "aten::gelu"} & set(seen.ops), "the plain ones are gone"


def test_gpt2_s_widest_biases_get_their_gradients_on_the_way() -> None:
    assert_equal_and_proved("fused_bias", "fused_norm", "checkpoint_full", name="tiny")
    seen = trace(make_run("fused_bias", name="tiny", overrides=SMALL), 1, watch=True).seen
    assert seen is not None
    assert {"rush::gelu_bias_grad_backward": 1, "rush::concat_bias_grad": 1}.items() <= seen.ops.items()


def test_bias_gradients_work_with_mixed_precision_and_fp8_matmuls() -> None:
    assert_equal_and_proved("fused_bias", "amp_bf16", name="tiny", dtype="bfloat16")
    assert_equal_and_proved("fused_bias", "fp8", name="tiny", dtype="float8")


def test_gpt2_has_nothing_to_rotate() -> None:
    with pytest.raises(MachineError, match="fused_rope cannot run here: it needs a model with RoPE"):
        check(recipe_of("fused_rope", name="tiny"), probe("cpu"))


def test_all_three_work_together_and_with_checkpointing() -> None:
    assert_equal_and_proved(*ALL, "checkpoint_full")


def test_all_three_work_with_mixed_precision() -> None:
    assert_equal_and_proved(*ALL, "amp_bf16", dtype="bfloat16")


@pytest.mark.parametrize("name", ["llama-tiny", pytest.param("tiny", marks=pytest.mark.slow)])
def test_they_compile_without_a_graph_break(name: str) -> None:
    techniques = ALL if name == "llama-tiny" else ("fused_norm", "fused_bias")
    assert_equal_and_proved(*techniques, "{name='compile', scope='block'}", name=name, steps=2)


@pytest.mark.parametrize("name", ["llama-tiny", "tiny"])
def test_weights_keep_their_names_and_values(name: str) -> None:
    techniques = ALL if name == "llama-tiny" else ("fused_norm", "fused_bias")
    plain = make_run(name=name, overrides=SMALL).model.state_dict()
    fused = make_run(*techniques, name=name, overrides=SMALL).model.state_dict()
    assert list(fused) == list(plain)
    assert all(torch.equal(fused[key], plain[key]) for key in plain)


def test_two_models_in_one_process_do_not_share_what_was_changed() -> None:
    fused, plain = make_run("fused_norm", overrides=SMALL).model, make_run(overrides=SMALL).model
    assert all(type(block) is FusedNormBlock for block in fused.blocks)
    assert not any(isinstance(block, FusedNormBlock) for block in plain.blocks)


def test_under_autocast_a_norm_writes_what_the_next_matmul_reads() -> None:
    run = make_run("fused_norm", "amp_bf16", overrides=SHORT)
    x_btd = torch.randn(2, 3, run.model.shape.hidden)
    with run.autocast():
        normed = run.model.final_norm(x_btd)
    assert normed.dtype == torch.bfloat16
    assert run.model.final_norm(x_btd).dtype == torch.float32
