"""On a CUDA device: fused_loss, fused_update and adam8bit by our own kernels take effect and learn the same."""

from __future__ import annotations

from functools import cache

import pytest

from rush.hardware import probe
from rush.techniques.api.evidence import prove
from rush.training.build import Run
from tests.techniques.tiny_runs import Trace, compare, make_run, trace

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]

SIZE = ("model.shape.hidden=256", "model.shape.head_dim=64", "model.shape.intermediate=512", "model.shape.context=256",
        "batch.sequence=256", "batch.micro=4", "batch.total_tokens=1024", "optimizer.lr=0.001")  # fmt: skip
STEPS = 4
CHANCE = "{name='fused_update', stochastic_rounding=true, state='bfloat16'}"
EIGHT_BITS = "{name='adam8bit', backend='rush'}"
STOCHASTIC_8BIT = "{name='adam8bit', backend='rush', stochastic_rounding=true}"


def on_gpu(*techniques: str, name: str) -> Run:
    return make_run(*techniques, name=name, overrides=SIZE, machine=probe("cuda"))


@cache
def plain(name: str) -> Trace:
    return trace(on_gpu(name=name), STEPS)


@pytest.mark.parametrize(
    ("name", "techniques", "dtype"),
    [
        ("tiny", ["fused_loss", "fused_update"], "float32"),
        ("llama-tiny", ["fused_loss", "amp_bf16"], "bfloat16"),
        ("llama-tiny", ["fused_loss", "amp_fp16", "fused_update"], "float16"),
        ("tiny", ["pure_bf16", "fused_loss", CHANCE], "bfloat16"),
        ("llama-tiny", ["pure_bf16", "fused_loss", "fused_update", "compile"], "bfloat16"),
        ("llama-tiny", ["amp_bf16", "fused_loss", "fused_update", "cuda_graph"], "bfloat16"),
        ("tiny", [EIGHT_BITS], "float32"),
        ("llama-tiny", ["pure_bf16", STOCHASTIC_8BIT], "bfloat16"),
    ],
    ids=str,
)
def test_stacks_take_effect_and_learn_what_plain_fp32_learns(
    name: str, techniques: list[str], dtype: str
) -> None:
    run = on_gpu(*techniques, name=name)
    ours = trace(run, STEPS, watch=True)
    assert ours.seen is not None
    proofs = prove(run.uses, ours.seen)
    assert all(proof.took_effect for proof in proofs.values()), proofs
    assert ours.seen.compiled.graph_breaks == 0
    verdict = compare(run, dtype, ours, plain(name))
    assert verdict.verdict == "equal", verdict.why
