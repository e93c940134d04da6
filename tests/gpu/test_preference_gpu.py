"""On a CUDA device: preferences start at log 2 whatever the techniques, learn what they learn on a CPU, and never hold
the logits of all rows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from rush.data import Batch
from rush.hardware import probe
from rush.recipe_io import load_recipe
from rush.training.build import Run, build
from rush.training.objectives.preference import log_probabilities
from rush.training.reference import set_live_reference
from rush.training.step import train_step
from tests.training.test_preference import make_pairs

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]
SIZE = ["model.shape.num_layers=2", "model.shape.hidden=256", "model.shape.head_dim=64", "model.shape.intermediate=512",
        "model.shape.vocab_size=64", "model.shape.context=256", "batch.sequence=256", "batch.micro=4",
        "batch.total_tokens=1024", "optimizer.lr=0.001", "objective.kind='dpo'"]  # fmt: skip
LOG_TWO = float(torch.tensor(math.log(2), dtype=torch.float32))


def skip_without_liger(techniques: str) -> None:
    if "liger" in techniques:
        pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")


def make_run(techniques: str, *changes: str, device: str = "cuda", name: str = "llama-tiny") -> Run:
    heads = ["model.shape.num_kv_heads=2"] if name == "llama-tiny" else []
    recipe = load_recipe(name, [*SIZE, *heads, f"techniques={techniques}", *changes])
    run = build(recipe, probe(device))
    set_live_reference(run, None)
    return run


def with_start(run: Run, batch: Batch) -> Batch:
    with torch.no_grad(), run.in_step(), run.autocast():
        held = log_probabilities(run.model, batch.to(run.device)).cpu()
    return replace(batch, reference_b=held)


TECHNIQUES = [
    "[]",
    "['amp_bf16']",
    "['amp_bf16', 'flash_attention', 'chunked_loss']",
    "['amp_bf16', 'fused_loss']",
    "['pure_bf16', 'flash_attention', 'fused_loss']",
    "['amp_bf16', 'lora']",
    "['amp_bf16', 'accumulate']",
    "['amp_bf16', 'cuda_graph']",
    "['liger']",
    "['amp_bf16', 'liger']",
    "['pure_bf16', 'flash_attention', 'liger']",
    "['amp_bf16', 'lora', 'liger']",
]


@pytest.mark.parametrize("reference", ["cached", "live"])
@pytest.mark.parametrize("techniques", TECHNIQUES)
def test_dpo_starts_at_exactly_log_two_on_the_device(techniques: str, reference: str) -> None:
    skip_without_liger(techniques)
    run = make_run(techniques, f"objective.reference='{reference}'")
    batch = make_pairs(4, seed=1, width=256, reference=False)
    batch = with_start(run, batch) if reference == "cached" else batch
    results = [train_step(run, step, 0.001, [batch]) for step in range(1, 6)]
    losses = [result.loss for result in results]
    assert losses[0] == LOG_TWO, f"{techniques}, {reference}: started at {losses[0]}"
    assert results[0].figures["accuracy"] == 0.5
    assert losses[-1] < losses[0], losses


@pytest.mark.parametrize(
    "techniques", ["['compile']", "['amp_bf16', 'compile']", "['amp_bf16', 'lora', 'compile']"]
)
@pytest.mark.parametrize("reference", ["cached", "live"])
def test_compiled_dpo_starts_near_log_two(techniques: str, reference: str) -> None:
    """The pass without gradients is another graph, which may round otherwise; in bf16 that is seen in the sums."""
    run = make_run(techniques, f"objective.reference='{reference}'")
    batch = make_pairs(4, seed=1, width=256, reference=False)
    batch = with_start(run, batch) if reference == "cached" else batch
    losses = [train_step(run, step, 0.001, [batch]).loss for step in range(1, 6)]
    assert losses[0] == pytest.approx(LOG_TWO, abs=1e-5 if techniques == "['compile']" else 0.05), losses
    assert losses[-1] < losses[0], losses


@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "orpo", "simpo"])
def test_the_device_learns_what_the_cpu_learns(kind: str) -> None:
    batch = make_pairs(4, seed=2, width=256)
    curves = []
    for device in ("cpu", "cuda"):
        run = make_run("[]", f"objective.loss='{kind}'", device=device)
        curves.append([train_step(run, step, 0.0003, [batch]).loss for step in range(1, 6)])
    assert curves[1] == pytest.approx(curves[0], rel=2e-3), f"{kind}: {curves}"


@pytest.mark.parametrize("kind", ["sigmoid", "simpo"])
def test_liger_learns_from_pairs_what_the_plain_model_learns(kind: str) -> None:
    skip_without_liger("liger")
    batch = make_pairs(4, seed=2, width=256)
    curves = []
    for techniques in ("[]", "['liger']"):
        run = make_run(techniques, f"objective.loss='{kind}'")
        curves.append([train_step(run, step, 0.0003, [batch]).loss for step in range(1, 6)])
    assert curves[1] == pytest.approx(curves[0], rel=2e-3), f"{kind}: {curves}"


@pytest.mark.parametrize("beside", ["[]", "['liger']"])
def test_the_logits_of_all_rows_never_exist(beside: str) -> None:
    """16 rows of 256 tokens with 32,768 words: 512 MiB of logits in fp32, their gradient as much again."""
    skip_without_liger(beside)
    peaks = {}
    for techniques in (
        ("['amp_bf16']", "['amp_bf16', 'chunked_loss']") if beside == "[]" else ("['amp_bf16', 'liger']",)
    ):
        run = make_run(techniques, "model.shape.vocab_size=32768", "batch.micro=8", "batch.total_tokens=2048")
        batch = make_pairs(8, seed=3, width=256)
        train_step(run, 1, 0.001, [batch])
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        train_step(run, 2, 0.001, [batch])
        peaks[techniques] = torch.cuda.max_memory_allocated() - before
        del run
    every = 16 * 256 * 32768 * 4
    assert max(peaks.values()) < every, f"{peaks}, all logits are {every}"
