"""On a CUDA device: with `run.deterministic` two runs give the same bits, whatever attention, loss and compiler they use."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rush.hardware import probe
from rush.techniques.attention.cudnn_attention import CudnnCore
from rush.techniques.precision.int8_matmul import Int8Layers
from tests.techniques.tiny_runs import make_loader, make_run, trace

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]

SIZE = ("model.shape.hidden=256", "model.shape.head_dim=64", "model.shape.intermediate=512", "model.shape.context=512",
        "batch.sequence=512", "batch.micro=8", "batch.total_tokens=8192", "optimizer.lr=0.001",
        "run.deterministic=true")  # fmt: skip
BLOCKS = "{name='compile', scope='block'}"
UPDATE = "{name='fused_update', stochastic_rounding=true, state='bfloat16'}"
FP8 = "{name='fp8', mlp='kernel', fast='all', scope='blocks_and_head'}"


@pytest.mark.parametrize(
    ("name", "techniques"),
    [
        ("tiny", ("pure_bf16", "cudnn_attention", "compile", "fused_loss", UPDATE, "fused_bias")),
        ("tiny", ("amp_bf16", "flash_attention", "fused_adamw", "compile")),
        (
            "llama-tiny",
            ("pure_bf16", "{name='cudnn_attention', heads='grouped'}", BLOCKS, "fused_loss", UPDATE),
        ),
        ("llama-tiny", ("pure_bf16", "flex_attention", BLOCKS, "chunked_loss", UPDATE)),
        ("llama-tiny", ("pure_bf16", "flash_attention", BLOCKS, "int8_matmul")),
        ("tiny", ("pure_bf16", "flash_attention", "compile", "int8_matmul")),
        pytest.param(
            "llama-tiny",
            ("pure_bf16", "cudnn_attention", BLOCKS, "fused_loss", UPDATE, FP8, "fused_projections"),
            marks=pytest.mark.skipif(
                not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
                reason="no 8-bit matmuls here",
            ),
        ),
    ],
)
def test_two_runs_have_the_same_weights_to_the_last_bit(name: str, techniques: tuple[str, ...]) -> None:
    """Each compiled anew and without the other's choices: what is only in memory is forgotten in between."""

    def weights() -> dict[str, Tensor]:
        torch.compiler.reset()
        run = make_run(*techniques, name=name, overrides=SIZE, machine=probe("cuda"))
        trace(run, 3)
        return {key: parameter.detach().clone() for key, parameter in run.model.named_parameters()}

    first, second = weights(), weights()
    assert [key for key in first if not torch.equal(first[key], second[key])] == []


def test_recomputed_attention_leaves_the_generators_where_they_were() -> None:
    """torch's compiler draws seeds at its first call; a checkpoint holds the generators, and a resumed run calls once more."""
    run = make_run(
        "pure_bf16", "flash_attention", "checkpoint_full", BLOCKS, overrides=SIZE, machine=probe("cuda")
    )
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    trace(run, 2)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert torch.equal(torch.cuda.get_rng_state(), before[1])


@pytest.mark.parametrize("techniques", [(), (BLOCKS,), ("compile",), ("cuda_graph",)], ids=str)
def test_a_compiled_or_captured_step_rounds_int8_gradients_by_the_seed_of_its_step(
    techniques: tuple[str, ...],
) -> None:
    torch.compiler.reset()
    run = make_run("pure_bf16", "int8_matmul", *techniques, overrides=SIZE, machine=probe("cuda"))
    noted = run.facts.noted(Int8Layers)
    assert noted is not None
    with make_loader(run) as loader:
        batch = next(iter(loader.next_step())).to(run.device)
    scale = torch.tensor(1.0, device="cuda")

    def gradients(seed: int) -> list[Tensor]:
        noted.seed.fill_(seed)
        run.optimizer.zero_grad(set_to_none=True)
        with run.in_step():
            run.micro_pass(batch, scale)
        return [p.grad.clone() for p in run.model.parameters() if p.grad is not None]

    first = gradients(1)
    assert not all(map(torch.equal, first, gradients(2)))
    assert all(map(torch.equal, first, gradients(1)))


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(8, 64), (2, 64), (2, 128)])
def test_our_backward_pass_behind_cudnn_is_as_exact_as_its_own_and_repeats(
    kv_heads: int, head_dim: int
) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    drawn = [
        torch.randn(2, 1024, heads, head_dim, device="cuda", generator=generator).bfloat16().transpose(1, 2)
        for heads in (8, kv_heads, kv_heads, 8)
    ]
    leaves, above = [tensor.requires_grad_() for tensor in drawn[:3]], drawn[3]

    def gradients(core: CudnnCore) -> tuple[Tensor, ...]:
        return torch.autograd.grad(core(*leaves), leaves, above)

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    out = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    right = torch.autograd.grad(out, exact, above.double())
    ours, theirs = gradients(CudnnCore(True, deterministic=True)), gradients(CudnnCore(True))
    for mine, cudnn, truth in zip(ours, theirs, right, strict=True):
        errors = [float((found.double() - truth).norm() / truth.norm()) for found in (mine, cudnn)]
        assert errors[0] <= 2 * errors[1], errors
    for _ in range(20):
        again = gradients(CudnnCore(True, deterministic=True))
        assert all(torch.equal(mine, other) for mine, other in zip(ours, again, strict=True))
