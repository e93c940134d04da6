"""On a CUDA device: fused layers, fp8 and int8 matmuls take effect, eager and compiled, and the model still learns the same."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from rush.hardware import probe
from rush.techniques.api.contract import Observation
from rush.techniques.api.evidence import prove
from tests.techniques.tiny_runs import Trace, compare, make_run, trace

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]

SIZE = ("model.shape.hidden=256", "model.shape.head_dim=64", "model.shape.intermediate=512", "model.shape.context=256",
        "batch.sequence=256", "batch.micro=4", "batch.total_tokens=1024", "optimizer.lr=0.001")  # fmt: skip
STEPS = 6
BLOCKS = "{name='compile', scope='block'}"
LLAMA = ("fused_norm", "fused_rope", "fused_mlp")
GPT2 = ("fused_norm", "fused_mlp")


@cache
def plain(name: str) -> Trace:
    return trace(make_run(name=name, overrides=SIZE, machine=probe("cuda")), STEPS)


def takes_effect_and_learns_the_same(*techniques: str, name: str, dtype: str) -> Observation:
    run = make_run(*techniques, name=name, overrides=SIZE, machine=probe("cuda"))
    ours = trace(run, STEPS, watch=True)
    assert ours.seen is not None
    proofs = prove(run.uses, ours.seen)
    assert all(proof.took_effect for proof in proofs.values()), proofs
    verdict = compare(run, dtype, ours, plain(name))
    assert verdict.verdict == "equal", verdict.why
    return ours.seen


@pytest.mark.parametrize(
    ("name", "techniques", "dtype"),
    [
        ("llama-tiny", LLAMA, "float32"),
        ("llama-tiny", (*LLAMA, "bf16_master", BLOCKS), "bfloat16"),
        ("tiny", (*GPT2, "amp_bf16"), "bfloat16"),
        ("tiny", ("fused_bias", "amp_bf16", BLOCKS), "bfloat16"),
        ("tiny", ("fused_bias", "bf16_master", "cudnn_attention", "compile"), "bfloat16"),
    ],
)
def test_fused_layers(name: str, techniques: tuple[str, ...], dtype: str) -> None:
    takes_effect_and_learns_the_same(*techniques, name=name, dtype=dtype)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="no 8-bit matmuls here",
)
@pytest.mark.parametrize(
    ("name", "techniques"),
    [
        ("llama-tiny", ("fp8", "bf16_master", BLOCKS)),
        ("llama-tiny", ("{name='fp8', recipe='rowwise'}", "bf16_master", BLOCKS)),
        ("llama-tiny", ("{name='fp8', casts='kernel', fast='all'}", "bf16_master")),
        ("llama-tiny", ("{name='fp8', scope='blocks_and_head'}", "vocab_pad", "bf16_master")),
        ("tiny", ("fp8", "amp_bf16")),
        ("llama-tiny", ("torchao_float8", "bf16_master", BLOCKS)),
        ("tiny", ("{name='torchao_float8', recipe='rowwise'}", "amp_bf16", "compile")),
    ],
)
def test_fp8_matmuls(name: str, techniques: tuple[str, ...]) -> None:
    seen = takes_effect_and_learns_the_same(*techniques, name=name, dtype="bfloat16")
    assert "rush::fp8_emulated_matmul" not in seen.ops
    assert "float8_e4m3fn" in seen.matmul_dtypes, sorted(seen.matmul_dtypes)
    # Three matmuls of each linear layer of a block (GPT-2 has four of them, Llama seven), and the head's.
    layers = {"tiny": 4, "llama-tiny": 7}[name] * 2 * 3 + (3 if "vocab_pad" in techniques else 0)
    assert seen.ops["aten::_scaled_mm"] >= layers


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="no int8 matmuls here",
)
@pytest.mark.parametrize(
    ("name", "techniques"),
    [
        ("llama-tiny", ("bf16_master", BLOCKS)),
        ("llama-tiny", ("bf16_master", BLOCKS, "fused_projections")),
        ("llama-tiny", ("amp_fp16", "checkpoint_selective")),
        ("tiny", ("amp_bf16", "compile")),
        ("tiny", ("bf16_master", "cuda_graph")),
    ],
)
def test_int8_matmuls(name: str, techniques: tuple[str, ...]) -> None:
    seen = takes_effect_and_learns_the_same("int8_matmul", *techniques, name=name, dtype="bfloat16")
    assert "int8" in seen.matmul_dtypes, sorted(seen.matmul_dtypes)
    if "fused_projections" not in techniques:
        layers = {"tiny": 4, "llama-tiny": 7}[name] * 2
        assert seen.matmuls_by_op["aten::_int_mm"] >= 3 * layers


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="no 8-bit matmuls here",
)
@pytest.mark.parametrize(
    ("name", "techniques"),
    [
        ("tiny", ("{name='fp8', scope='head'}", "bf16_master", "compile")),
        ("tiny", ("{name='fp8', scope='head'}", "amp_bf16")),
        ("llama-tiny", ("{name='fp8', scope='blocks_and_head'}", "bf16_master", BLOCKS)),
    ],
)
def test_an_fp8_lm_head_is_fused_with_its_loss(name: str, techniques: tuple[str, ...]) -> None:
    chunks = "{name='fused_loss', chunk_tokens=512}"
    seen = takes_effect_and_learns_the_same(*techniques, chunks, name=name, dtype="bfloat16")
    assert any("fp8_logits_gradient" in kernel for kernel in seen.kernels)
    assert "rush::fp8_emulated_matmul" not in seen.ops
    assert seen.ops["aten::_scaled_mm"] >= 3 * 2, "three matmuls of each of two chunks"
