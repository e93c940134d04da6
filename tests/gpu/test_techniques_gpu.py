"""On a CUDA device: each technique takes effect, and the model still learns the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from rush.data import Batch
from rush.hardware import probe
from rush.recipe_io import load_recipe
from rush.train.build import Run, build
from rush.train.step import train_step

pytestmark = pytest.mark.gpu

SMALL = ["model.shape.num_layers=2", "model.shape.hidden=256", "model.shape.head_dim=64", "model.shape.num_heads=4",
         "model.shape.intermediate=512", "batch.sequence=256", "batch.total_tokens=1024", "batch.micro=4"]  # fmt: skip


def make_run(name: str, techniques: str) -> Run:
    heads = ["model.shape.num_kv_heads=4"] if name == "tiny" else ["model.shape.num_kv_heads=2"]
    return build(load_recipe(name, [*SMALL, *heads, f"techniques={techniques}"]), probe("cuda"))


def text_batch(seed: int) -> Batch:
    """Bytes of this file: real text, not noise."""
    data = torch.tensor(list(Path(__file__).read_bytes()), dtype=torch.int64)
    starts = torch.randint(0, len(data) - 257, (4,), generator=torch.Generator().manual_seed(seed))
    rows = torch.stack([data[start : start + 257] for start in starts.tolist()])
    return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), ("",) * 4)


def losses(run: Run, steps: int = 8) -> list[float]:
    return [train_step(run, step, 1e-3, [text_batch(step)]).loss for step in range(1, steps + 1)]


def kernels(run: Run) -> str:
    batch = text_batch(99)
    train_step(run, 1, 1e-3, [batch])
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        train_step(run, 2, 1e-3, [batch])
        torch.cuda.synchronize()
    return "\n".join(event.key for event in seen.key_averages())


@pytest.mark.parametrize("name", ["tiny", "llama-tiny"])
@pytest.mark.parametrize(
    ("techniques", "tolerance"),
    [
        ("['tf32']", 2e-3),
        ("['amp_bf16']", 1e-2),
        ("['pure_bf16']", 5e-2),
        ("['amp_bf16', 'flash_attention']", 1e-2),
        ("['fused_adamw']", 1e-4),
        ("['amp_bf16', 'flash_attention', 'fused_adamw', 'compile']", 1e-2),
        ("['amp_bf16', 'flash_attention', {name='compile', scope='block'}]", 1e-2),
    ],
)
def test_the_loss_follows_plain_fp32(name: str, techniques: str, tolerance: float) -> None:
    plain = losses(make_run(name, "[]"))
    ours = losses(make_run(name, techniques))
    assert ours == pytest.approx(plain, rel=tolerance)
    assert plain[-1] < plain[0] - 0.5


@pytest.mark.parametrize("compiled", ["", ", 'compile'"])
def test_the_flash_kernel_really_runs_and_the_plain_softmax_does_not(compiled: str) -> None:
    names = kernels(make_run("llama-tiny", f"['amp_bf16', 'flash_attention'{compiled}]"))
    assert "flash_fwd" in names
    assert "flash_bwd" in names
    assert "cudnn" not in names.lower()


def test_the_fused_update_really_runs() -> None:
    assert "FusedAdam" in kernels(make_run("tiny", "['fused_adamw']"))
    assert "FusedAdam" not in kernels(make_run("tiny", "[]"))


def test_a_deterministic_run_gives_the_same_bits_twice() -> None:
    def weights() -> dict[str, torch.Tensor]:
        recipe = load_recipe("tiny", [*SMALL, "model.shape.num_kv_heads=4", "run.deterministic=true",
                                      "techniques=['amp_bf16', 'flash_attention', 'fused_adamw']"])  # fmt: skip
        run = build(recipe, probe("cuda"))
        losses(run)
        return {name: p.detach().clone() for name, p in run.model.named_parameters()}

    first, second = weights(), weights()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_initial_weights_do_not_depend_on_the_device() -> None:
    recipe = load_recipe("llama-tiny")
    here, there = build(recipe, probe("cpu")), build(recipe, probe("cuda"))
    on_gpu: Callable[[str], torch.Tensor] = dict(there.model.named_parameters()).__getitem__
    assert all(torch.equal(p, on_gpu(name).cpu()) for name, p in here.model.named_parameters())
