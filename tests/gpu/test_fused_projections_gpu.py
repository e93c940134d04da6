"""On a CUDA device: layers of one input are one product, eager, compiled, recorded and in 8 bits, and learn the same."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from rush.hardware import probe
from rush.techniques.api.contract import Observation
from rush.techniques.api.evidence import prove
from rush.training.build import Run
from tests.techniques.tiny_runs import Trace, compare, make_run, one_batch, trace

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]

SIZE = ("model.shape.hidden=256", "model.shape.head_dim=64", "model.shape.intermediate=768", "model.shape.context=256",
        "batch.sequence=256", "batch.micro=4", "batch.total_tokens=1024", "optimizer.lr=0.001")  # fmt: skip
STEPS = 6
FUSED = "fused_projections"
BLOCKS, WHOLE = "{name='compile', scope='block'}", "compile"
CHANCE = "{name='fused_update', stochastic_rounding=true, state='bfloat16'}"


def run_of(*techniques: str) -> Run:
    return make_run(*techniques, overrides=SIZE, machine=probe("cuda"))


@cache
def plain() -> Trace:
    return trace(run_of(), STEPS)


def takes_effect_and_learns_the_same(*techniques: str, dtype: str) -> tuple[Run, Observation]:
    run = run_of(FUSED, *techniques)
    ours = trace(run, STEPS, watch=True)
    assert ours.seen is not None
    for name, proof in prove(run.uses, ours.seen).items():
        assert proof.took_effect, f"{name}: {proof.what}"
    verdict = compare(run, dtype, ours, plain())
    assert verdict.verdict == "equal", verdict.why
    return run, ours.seen


def joined_weights(run: Run) -> list[list[torch.nn.Parameter]]:
    parts = (("attention.q", "attention.k", "attention.v"), ("mlp.gate", "mlp.up"))
    return [
        [block.get_parameter(f"{name}.weight") for name in names]
        for block in run.model.blocks
        for names in parts
    ]


@pytest.mark.parametrize(
    ("techniques", "dtype"),
    [
        ((), "float32"),
        (("amp_bf16", "flash_attention", BLOCKS), "bfloat16"),
        (("pure_bf16", "cudnn_attention", CHANCE, BLOCKS), "bfloat16"),
        (("bf16_master", "triton_attention", WHOLE), "bfloat16"),
        (("amp_bf16", "fused_norm", "fused_rope", "fused_mlp"), "bfloat16"),
        (("bf16_master", "checkpoint_selective", "flash_attention", BLOCKS), "bfloat16"),
        (("amp_bf16", "checkpoint_full", "flash_attention"), "bfloat16"),
        (("bf16_master", "offload_activations", "flash_attention"), "bfloat16"),
        (("pure_bf16", "{name='adam8bit', backend='rush'}", BLOCKS), "bfloat16"),
    ],
    ids=str,
)
def test_stacks(techniques: tuple[str, ...], dtype: str) -> None:
    run, seen = takes_effect_and_learns_the_same(*techniques, dtype=dtype)
    assert seen.compiled.graph_breaks == 0
    (batch,) = one_batch(run)
    with run.in_step():
        run.forward_backward(batch.to(run.device), torch.ones((), device=run.device))
    for group in joined_weights(run):
        for what in ("data", "grad"):
            places = {getattr(weight, what).untyped_storage().data_ptr() for weight in group}
            assert len(places) == 1, f"the {what} of a group was copied apart"


@pytest.mark.parametrize("compiled", [(), (BLOCKS,)], ids=str)
def test_a_captured_graph_replays_the_joined_matmuls(compiled: tuple[str, ...]) -> None:
    takes_effect_and_learns_the_same(
        "bf16_master", "flash_attention", "cuda_graph", *compiled, dtype="bfloat16"
    )


def test_it_works_with_liger() -> None:
    """Whose kernels want whole tensors, and copy the parts out."""
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    takes_effect_and_learns_the_same("amp_bf16", "liger", dtype="bfloat16")


def test_graphs_captured_by_the_compiler_learn_the_same() -> None:
    mode = "{name='compile', mode='reduce-overhead'}"
    takes_effect_and_learns_the_same("bf16_master", "flash_attention", mode, dtype="bfloat16")


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="no 8-bit matmuls here",
)
@pytest.mark.parametrize(
    "fp8",
    [
        "fp8",
        "{name='fp8', recipe='rowwise'}",
        "{name='fp8', casts='kernel', fast='all'}",
        "{name='fp8', mlp='kernel'}",
        "{name='fp8', mlp='kernel', casts='kernel'}",
    ],
)
@pytest.mark.parametrize("compiled", [(), (BLOCKS,)], ids=str)
def test_fp8_matmuls(fp8: str, compiled: tuple[str, ...]) -> None:
    _, seen = takes_effect_and_learns_the_same(fp8, "bf16_master", *compiled, dtype="bfloat16")
    assert "float8_e4m3fn" in seen.matmul_dtypes, sorted(seen.matmul_dtypes)
    # Two blocks: qkv, out, gate and up, down; forward and both gradients.
    layers = {256, 512, 768, 1024, 1536}  # not the head's, whose vocabulary the compiler may have padded
    scaled = sum(count for shape, count in seen.matmul_shapes.items() if layers.issuperset(shape))
    assert scaled == 2 * 4 * 3, dict(seen.matmul_shapes)


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="no 8-bit matmuls here",
)
@pytest.mark.parametrize(
    "more", [(), (BLOCKS,), ("checkpoint_full",), ("checkpoint_selective", BLOCKS)], ids=str
)
def test_the_mlp_in_8_bits_as_one_function_has_the_gradients_of_its_layers(more: tuple[str, ...]) -> None:
    """They differ by less than what 8 bits cost: by where SwiGLU and its gradient are rounded, and what follows of it."""
    ways = (), ("fp8", FUSED, *more), ("{name='fp8', mlp='kernel'}", FUSED, *more)
    runs = [run_of("bf16_master", "flash_attention", *techniques) for techniques in ways]
    (batch,) = one_batch(runs[0])
    for run in runs:
        with run.in_step():
            run.forward_backward(batch.to(run.device), torch.ones((), device=run.device))
    plain_grads, layers, ours = (
        {name: p.grad.double() for name, p in run.model.named_parameters() if p.grad is not None}
        for run in runs
    )
    assert ours.keys() == plain_grads.keys()
    for name, truth in plain_grads.items():
        apart = (layers[name] - truth).norm()
        assert apart > 0, name
        if truth.dim() > 1:  # a norm's few gains are sums over all tokens, and of chance
            assert (ours[name] - truth).norm() <= 1.15 * apart, name
            assert (ours[name] - layers[name]).norm() <= apart, name


def test_the_weights_take_no_more_memory() -> None:
    held = []
    for techniques in (("pure_bf16",), ("pure_bf16", FUSED)):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        run = run_of(*techniques)
        held.append(torch.cuda.memory_allocated() - before)
        del run
    # The allocator rounds every piece up to 512 bytes.
    assert held[1] <= held[0] + 512 * 4, held
