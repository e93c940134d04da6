"""On a CUDA device: each technique takes effect, and the model still learns the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache

import pytest
import torch

from rush.data import Batch
from rush.hardware import probe
from rush.recipe_io import load_recipe
from rush.techniques import registry
from rush.techniques.api.evidence import prove
from rush.techniques.attention.cudnn_attention import CudnnCore
from rush.techniques.memory.expandable_segments import ExpandableSegments
from rush.training.build import Run, build
from tests.techniques.tiny_runs import Trace, compare, make_run, trace

pytestmark = [
    pytest.mark.gpu,
    # Compilers and libraries give advice (tensor cores, hashing, first use of a profiler), other on every version.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

SIZE = ("model.shape.hidden=256", "model.shape.head_dim=64", "model.shape.intermediate=512", "model.shape.context=256",
        "batch.sequence=256", "batch.micro=4", "batch.total_tokens=1024", "optimizer.lr=0.001")  # fmt: skip
EXACTLY = (*SIZE, "run.deterministic=true")
STEPS = 6
CHUNKS = "{name='chunked_loss', chunk_tokens=256}"
BLOCKS = "{name='compile', scope='block'}"


def on_gpu(*techniques: str, name: str = "llama-tiny", overrides: tuple[str, ...] = SIZE) -> Run:
    return make_run(*techniques, name=name, overrides=overrides, machine=probe("cuda"))


@cache
def plain(name: str = "llama-tiny", overrides: tuple[str, ...] = SIZE) -> Trace:
    return trace(on_gpu(name=name, overrides=overrides), STEPS, watch=True)


def takes_effect_and_learns_the_same(
    *techniques: str, dtype: str = "float32", name: str = "llama-tiny", overrides: tuple[str, ...] = SIZE
) -> Trace:
    run = on_gpu(*techniques, name=name, overrides=overrides)
    ours = trace(run, STEPS, watch=True)
    assert ours.seen is not None
    proofs = prove(run.uses, ours.seen)
    assert len(proofs) == len(techniques)
    assert all(proof.took_effect for proof in proofs.values()), proofs
    verdict = compare(run, dtype, ours, plain(name, overrides))
    assert verdict.verdict == "equal", verdict.why
    return ours


@pytest.mark.parametrize("name", sorted(registry()))
def test_its_evidence_fails_on_a_plain_run(name: str) -> None:
    technique = registry()[name]
    seen = plain().seen
    assert seen is not None
    proof = technique.evidence(seen, {key: knob.default for key, knob in technique.knobs.items()})
    assert not proof.took_effect, proof.what


@pytest.mark.parametrize("name", ["tiny", "llama-tiny"])
@pytest.mark.parametrize(
    ("techniques", "dtype"),
    [
        (["tf32"], "tf32"),
        (["amp_bf16"], "bfloat16"),
        (["amp_fp16"], "float16"),
        (["bf16_master"], "bfloat16"),
        (["bf16_master", "fused_adamw"], "bfloat16"),
        (["pure_bf16"], "bfloat16"),
        (["fused_adamw"], "float32"),
        ([CHUNKS], "float32"),
        (["vocab_pad"], "float32"),
        (["accumulate"], "float32"),
    ],
)
def test_arithmetic(name: str, techniques: list[str], dtype: str) -> None:
    takes_effect_and_learns_the_same(*techniques, dtype=dtype, name=name)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_cudnn_reads_grouped_heads_as_if_they_were_repeated(head_dim: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(heads: int) -> torch.Tensor:
        # As linear layers leave them: positions outside, heads inside.
        dims = (2, 512, heads, head_dim)
        return torch.randn(dims, generator=generator, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    inputs, weights = [drawn(8), drawn(2), drawn(2)], drawn(8)

    def results(grouped: bool) -> list[torch.Tensor]:
        q, k, v = (tensor.detach().clone().requires_grad_() for tensor in inputs)
        out = CudnnCore(grouped)(q, k, v)
        (out * weights).sum().backward()
        return [out, *(tensor.grad for tensor in (q, k, v) if tensor.grad is not None)]

    for ours, theirs in zip(results(grouped=True), results(grouped=False), strict=True):
        assert ours.shape == theirs.shape
        assert float((ours - theirs).float().norm() / theirs.float().norm()) < 1e-2


@pytest.mark.parametrize("name", ["tiny", "llama-tiny"])
@pytest.mark.parametrize("core", ["flash_attention", "cudnn_attention"])
@pytest.mark.parametrize(("amp", "dtype"), [("amp_bf16", "bfloat16"), ("amp_fp16", "float16")])
def test_attention(name: str, core: str, amp: str, dtype: str) -> None:
    """The second family shares key/value heads among query heads."""
    ours = takes_effect_and_learns_the_same(amp, core, dtype=dtype, name=name)
    assert ours.seen is not None
    names = "\n".join(ours.seen.kernels).lower()
    assert ("cudnn" in names) == (core == "cudnn_attention")


def test_generated_attention() -> None:
    takes_effect_and_learns_the_same("amp_bf16", "flex_attention", dtype="bfloat16")


@pytest.mark.parametrize(
    "techniques",
    [
        ["checkpoint_full"],
        ["{name='checkpoint_full', inputs='host'}"],
        ["{name='checkpoint_full', inputs='host'}", BLOCKS],
        ["checkpoint_selective"],
        ["{name='checkpoint_selective', keep='half'}"],
        ["offload_activations"],
        ["{name='offload_activations', pin=false}"],
        ["loader_workers"],
        ["pin_memory"],
        ["loader_workers", "pin_memory", "gc_control"],
        ["cuda_graph"],
        ["{name='cuda_graph', gradients='written'}"],
        ["expandable_segments"],
        ["expandable_segments", "checkpoint_full", BLOCKS],
        ["cuda_graph", "checkpoint_full", "pin_memory", "loader_workers"],
    ],
)
def test_the_same_bits(techniques: list[str]) -> None:
    takes_effect_and_learns_the_same(*techniques, overrides=EXACTLY)


def test_segments_that_grow_leave_no_gap_where_others_do() -> None:
    unit, whole = 2**30, torch.cuda.get_device_properties(0).total_memory

    def fits(growing: bool) -> bool:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 5 * unit) / whole)
        try:
            with ExpandableSegments().segments() if growing else nullcontext():
                large = torch.empty(4 * unit, dtype=torch.uint8, device="cuda")
                del large
                # It lies where the large one lay, and holds the rest of its segment.
                small = torch.empty(unit, dtype=torch.uint8, device="cuda")
                torch.empty(7 * unit // 2, dtype=torch.uint8, device="cuda")
                return small.is_cuda
        except torch.OutOfMemoryError:
            return False
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
            torch.cuda.empty_cache()

    assert (fits(growing=False), fits(growing=True)) == (False, True)


def test_recomputing_and_offloading_leave_less_in_memory_between_forward_and_backward() -> None:
    def held(*techniques: str) -> int:
        seen = trace(on_gpu(*techniques), 2, watch=True).seen
        assert seen is not None
        return seen.held_bytes

    everything = held()
    full, selective, offloaded = (
        held(name) for name in ("checkpoint_full", "checkpoint_selective", "offload_activations")
    )
    assert full < selective < everything
    assert offloaded < everything / 2
    assert held(CHUNKS) < everything
    assert held("accumulate") < 0.6 * everything


@pytest.mark.parametrize("backend", ["torchao", "bitsandbytes"])
def test_8_bit_moments(backend: str) -> None:
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    takes_effect_and_learns_the_same(f"{{name='adam8bit', backend='{backend}'}}")


@pytest.mark.parametrize(
    ("name", "techniques"),
    [
        ("llama-tiny", ["amp_bf16", "flash_attention", "fused_adamw", "compile"]),
        ("llama-tiny", ["amp_bf16", "flash_attention", "checkpoint_selective", BLOCKS]),
        ("tiny", ["amp_bf16", CHUNKS, "vocab_pad", "checkpoint_full", "compile", "cuda_graph"]),
        ("tiny", ["amp_bf16", "cudnn_attention", "vocab_pad", "checkpoint_selective", BLOCKS, "cuda_graph"]),
        ("tiny", ["amp_bf16", "cudnn_attention", "accumulate", "gc_control", BLOCKS, "cuda_graph"]),
        ("tiny", ["amp_bf16", "{name='compile', mode='reduce-overhead'}"]),
    ],
)
def test_compiled(name: str, techniques: list[str]) -> None:
    ours = takes_effect_and_learns_the_same(*techniques, dtype="bfloat16", name=name)
    assert ours.seen is not None
    assert ours.seen.compiled.graph_breaks == 0


def test_a_long_stack() -> None:
    takes_effect_and_learns_the_same(
        "amp_bf16", "flash_attention", "fused_adamw", CHUNKS, "vocab_pad", "checkpoint_full", "accumulate",
        "cuda_graph", "loader_workers", "pin_memory", "gc_control", dtype="bfloat16",
    )  # fmt: skip


def test_a_captured_graph_follows_the_weights_and_other_shapes() -> None:
    """Replays read the weights as they are now, and another batch size gets a recording of its own."""
    recorded, eager = on_gpu("cuda_graph"), on_gpu()
    loss_scale = torch.full((), 1 / 512, device="cuda")
    generator = torch.Generator().manual_seed(0)
    for rows in (4, 2, 4):
        tokens, labels = (torch.randint(0, 257, (rows, 256), generator=generator).cuda() for _ in range(2))
        losses = [run.micro_pass(Batch(tokens, labels), loss_scale) for run in (recorded, eager)]
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=0)
        with torch.no_grad():
            for run in (recorded, eager):
                run.model.final_norm.weight.mul_(1.5)
    theirs = dict(eager.model.named_parameters())
    for name, parameter in recorded.model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-3, atol=1e-5)


def test_a_deterministic_run_gives_the_same_bits_twice() -> None:
    def weights() -> dict[str, torch.Tensor]:
        run = on_gpu("amp_bf16", "flash_attention", "fused_adamw", overrides=EXACTLY)
        trace(run, STEPS)
        return {name: p.detach().clone() for name, p in run.model.named_parameters()}

    first, second = weights(), weights()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_initial_weights_do_not_depend_on_the_device() -> None:
    recipe = load_recipe("llama-tiny")
    here, there = build(recipe, probe("cpu")), build(recipe, probe("cuda"))
    on_device: Callable[[str], torch.Tensor] = dict(there.model.named_parameters()).__getitem__
    assert all(torch.equal(p, on_device(name).cpu()) for name, p in here.model.named_parameters())
