"""On a CUDA device: the fine-tuning baselines run with their kernels, our fastest QLoRA stack holds, and memory is counted whole."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rush.data import Batch
from rush.hardware import peak_memory_bytes, probe, reset_peak_memory
from rush.recipe_io import load_recipe
from rush.techniques.api.evidence import prove
from rush.training.step import train_step
from tests.techniques.tiny_runs import make_run, trace

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]
SHAPE = ("model.shape.hidden=256", "model.shape.num_heads=4", "model.shape.num_kv_heads=2", "model.shape.head_dim=64",
         "model.shape.intermediate=512", "model.shape.vocab_size=512", "model.shape.context=256", "batch.micro=2",
         "batch.sequence=128", "batch.total_tokens=256")  # fmt: skip
FULL: dict[str, Any] = {"dtype": "bfloat16", "with_liger": True}
LORA: dict[str, Any] = {**FULL, "rank": 8, "alpha": 16, "autocast": True}
QLORA: dict[str, Any] = {**LORA, "quantized": True, "checkpointing": True}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def batch() -> Batch:
    tokens = torch.randint(1, 512, (2, 129), generator=torch.Generator().manual_seed(3))
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), ("a", "b"))


@pytest.mark.parametrize("options", [FULL, LORA, QLORA], ids=["full", "lora", "qlora"])
def test_a_baseline_s_kernels_run_and_it_learns(options: dict[str, Any]) -> None:
    for name in ("transformers", "liger_kernel", "peft", "bitsandbytes"):
        pytest.importorskip(name)
    from rush.bench.baseline_run import LIGER, BaselineOptions, build_baseline

    torch.manual_seed(0)
    run = build_baseline(load_recipe("llama-tiny", list(SHAPE)), probe("cuda"), BaselineOptions(**options))
    losses = [train_step(run, step, 5e-3, [batch()]).loss for step in range(1, 9)]
    assert losses[-1] < losses[0] - 0.05, losses
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        train_step(run, 9, 5e-3, [batch()])
    names = {event.key for event in profile.key_averages()}
    wanted = [*LIGER, *(["Dequantize"] if options.get("quantized") else [])]
    missing = [part for part in wanted if not any(part in name for name in names)]
    assert not missing, (missing, sorted(names))


@pytest.mark.parametrize("biases", [False, True])
def test_nanogpts_kernels_run_compiled_and_it_learns(biases: bool) -> None:
    """Fused attention, fused AdamW and the compiler's kernels, in plain bf16 autocast."""
    from rush.bench.nanogpt import NanoGPTOptions, build_nanogpt

    recipe = load_recipe(
        "tiny",
        [*SHAPE, "model.shape.num_kv_heads=4", "batch.micro=8", "batch.total_tokens=1024", "techniques=[]"],
    )
    options = NanoGPTOptions(biases=biases)
    run = build_nanogpt(recipe, probe("cuda"), options)
    losses = [train_step(run, step, 5e-3, [batch()]).loss for step in range(1, 9)]
    assert losses[-1] < losses[0] - 0.05, losses
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        train_step(run, 9, 5e-3, [batch()])
    names = {event.key for event in profile.key_averages()}
    missing = [part for part in options.kernels(recipe.shape()) if not any(part in name for name in names)]
    assert not missing, (missing, sorted(names))


STACK = ("pure_bf16", "{name='qlora', rank=8}", "flash_attention", "checkpoint_full", "{name='compile', scope='block'}",
         "{name='fused_loss', chunk_tokens=512}", "{name='fused_update', stochastic_rounding=true}")  # fmt: skip


@pytest.mark.parametrize("more", [(), ("cuda_graph",)], ids=["launched", "captured"])
def test_the_fastest_qlora_stack_takes_effect_as_a_whole(more: tuple[str, ...]) -> None:
    pytest.importorskip("bitsandbytes")
    # A proof knows the LM head's matmuls by the vocabulary: no other width of the model may be the same (the MLP's is 512).
    size = ("batch.micro=8", "batch.total_tokens=1024", "optimizer.lr=0.003", "model.shape.vocab_size=640")
    run = make_run(*STACK, *more, overrides=[*SHAPE, *size], machine=probe("cuda"))
    seen = trace(run, 8, watch=True)
    assert seen.seen is not None
    for name, proof in prove(run.uses, seen.seen).items():
        assert proof.took_effect, (name, proof.what)
    assert seen.losses[-1] < seen.losses[0], seen.losses


def test_what_a_captured_graph_keeps_is_counted_as_memory() -> None:
    """The allocator calls a captured graph's memory free; a replay works in it all the same."""
    device = torch.device("cuda")
    torch.cuda.empty_cache()
    x = torch.zeros(1024, 1024, device=device)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        (x @ x).sum()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        kept = torch.zeros(64, 2**20, dtype=torch.uint8, device=device)  # 64 MiB inside the capture
        total = (x + kept.float().sum()).sum()
        del kept
    reset_peak_memory("cuda")
    before = torch.cuda.max_memory_allocated()
    graph.replay()
    assert torch.cuda.max_memory_allocated() == before, "the allocator does not see it"
    assert peak_memory_bytes("cuda") >= before + 64 * 2**20
    assert torch.isfinite(total)
