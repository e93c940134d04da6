"""On a CUDA device: paged moments are in unified memory, leave the device's, learn the same, and come back paged."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rush.checkpoint import restore
from rush.hardware import probe
from rush.records.checkpoint_store import CheckpointStore
from rush.techniques.api.evidence import prove, prove_use
from rush.techniques.optimizer.adam8bit import PAGED_FROM, paged_bytes
from rush.training.build import Run
from rush.training.step import train_step
from tests.techniques.tiny_runs import compare, make_loader, make_run, trace

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::UserWarning")]
SIZE = ("model.shape.hidden=512", "model.shape.head_dim=64", "model.shape.num_heads=8", "model.shape.intermediate=1024",
        "model.shape.context=256", "batch.sequence=256", "batch.micro=4", "batch.total_tokens=1024", "optimizer.lr=0.001")  # fmt: skip
PLAIN = "{name='adam8bit', backend='bitsandbytes'}"
PAGED = "{name='adam8bit', backend='bitsandbytes', paged=true}"


@pytest.fixture(autouse=True)
def _installed_and_tidy() -> Iterator[None]:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    yield
    gc.collect()
    torch.cuda.empty_cache()


def on_gpu(*techniques: str, more: tuple[str, ...] = ()) -> Run:
    return make_run(*techniques, overrides=(*SIZE, *more), machine=probe("cuda"))


def expected_bytes(run: Run) -> int:
    """One byte for each of two moments of the tensors that are large enough."""
    return 2 * sum(p.numel() for p in run.model.parameters() if p.numel() >= PAGED_FROM)


@pytest.mark.parametrize("beside", [(), ("amp_bf16",)], ids=["fp32", "amp_bf16"])
def test_it_takes_effect_and_learns_the_same(beside: tuple[str, ...]) -> None:
    run = on_gpu(PAGED, *beside)
    ours = trace(run, 6, watch=True)
    assert ours.seen is not None
    proofs = prove(run.uses, ours.seen)
    assert all(proof.took_effect for proof in proofs.values()), proofs
    assert paged_bytes(run.optimizer) == expected_bytes(run) > 0
    verdict = compare(run, "bfloat16" if beside else "float32", ours, trace(on_gpu(), 6))
    assert verdict.verdict == "equal", verdict.why


def test_moments_that_are_not_paged_do_not_pass_for_it() -> None:
    run = on_gpu(PLAIN)
    seen = trace(run, 1, watch=True).seen
    assert seen is not None
    (use,) = run.uses
    assert prove_use(use, seen).took_effect
    proof = prove_use(replace(use, knobs={**use.knobs, "paged": True}), seen)
    assert not proof.took_effect, proof.what


def test_the_moments_leave_the_devices_memory() -> None:
    """What torch counts on the device: unified memory is not among it."""
    trace(on_gpu(PLAIN), 2)  # what libraries allocate once and keep is not of either
    left = {}
    for techniques in (PLAIN, PAGED):
        gc.collect()
        before = torch.cuda.memory_allocated()
        run = on_gpu(techniques)
        trace(run, 2)
        gc.collect()
        left[techniques] = torch.cuda.memory_allocated() - before
        expected = expected_bytes(run)
        del run
    saved = left[PLAIN] - left[PAGED]
    assert saved == pytest.approx(expected, rel=0.1), f"saved {saved:,} of {expected:,}: {left}"


def test_a_resumed_run_pages_again_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    exactly = ("run.deterministic=true",)
    first = on_gpu(PAGED, more=exactly)
    with make_loader(first) as loader:
        batches = [list(loader.next_step()) for _ in range(4)]
    for step in (1, 2):
        train_step(first, step, 0.001, iter(batches[step - 1]))
    path = restore.save(store, 2, first.model, first.optimizer, {})
    second = on_gpu(PAGED, more=exactly)
    restore.load(path, second.model, second.optimizer)
    for run in (first, second):
        for step in (3, 4):
            train_step(run, step, 0.001, iter(batches[step - 1]))
    assert paged_bytes(second.optimizer) == paged_bytes(first.optimizer) == expected_bytes(first)
    for (name, one), (_, other) in zip(
        first.model.named_parameters(), second.model.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), f"{name} differs by {(one - other).abs().max()}"
