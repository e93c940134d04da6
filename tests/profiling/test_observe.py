"""Watching a run: what the observation says is what arithmetic says it must be."""

from __future__ import annotations

import gc
import time
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from rush.data import Batch
from rush.hardware import probe
from rush.profiling.breakdown import CLASSES, classify, kernel_times
from rush.profiling.observe import observe, state_bytes
from tests.techniques.tiny_runs import make_loader, make_run


def watched(*techniques: str, steps: int = 1, pause_s: float = 0.0, **options: Any) -> Any:
    run = make_run(*techniques, **options)
    with make_loader(run) as loader:

        def batches() -> Any:
            time.sleep(pause_s)
            return list(loader.next_step())

        return observe(run, batches, steps=steps)


@cache
def plain() -> Any:
    return watched(pause_s=0.05)


def test_the_matmuls_of_a_plain_step_are_three_for_every_linear_layer_and_pass() -> None:
    seen = watched(name="tiny", steps=2, overrides=["batch.total_tokens=256"])
    assert seen.micro_batches == 2
    assert seen.block_forwards == 1.0
    tokens, hidden, wide, vocab = 128, 64, 96, 257
    expected = {
        (tokens, hidden, 3 * hidden): 2, (tokens, 3 * hidden, hidden): 2, (3 * hidden, tokens, hidden): 2,
        (tokens, hidden, hidden): 4, (hidden, tokens, hidden): 2,
        (tokens, hidden, wide): 4, (tokens, wide, hidden): 4, (wide, tokens, hidden): 2, (hidden, tokens, wide): 2,
        (tokens, hidden, vocab): 1, (tokens, vocab, hidden): 1, (vocab, tokens, hidden): 1,
    }  # fmt: skip
    assert seen.matmul_shapes == {shape: 2 * count for shape, count in expected.items()}
    assert seen.matmul_dtypes == {"float32"}
    assert seen.weight_dtypes == {"float32"}
    # Logits of a micro batch are the largest tensor that is no parameter.
    assert seen.largest_tensor == tokens * vocab
    assert not seen.eager_step
    assert seen.micro_tokens == tokens
    assert 0 < seen.fp32_matmul_error < 5e-6


def test_adamw_keeps_eight_bytes_for_every_parameter() -> None:
    assert state_bytes(make_run().optimizer) == {}
    seen = plain()
    assert seen.num_parameters == sum(p.numel() for p in make_run().model.parameters())
    assert seen.state_bytes == {"float32": 8 * seen.num_parameters}


def test_the_breakdown_adds_up_to_the_step_and_names_where_the_time_went() -> None:
    seen = plain()
    assert set(seen.breakdown_ms) == set(CLASSES)
    assert sum(seen.breakdown_ms.values()) == pytest.approx(seen.step_ms, rel=0.02)
    assert seen.data_wait_ms >= 50
    assert seen.breakdown_ms["data"] >= 45
    for kind in ("attention", "matmul", "norm_elementwise", "loss", "optimizer"):
        assert seen.breakdown_ms[kind] > 0, kind


def test_the_longest_operators_are_told_with_their_time_and_how_often_they_ran() -> None:
    seen = plain()
    times = [piece["ms"] for piece in seen.longest]
    assert times == sorted(times, reverse=True)
    assert sum(times) <= sum(seen.breakdown_ms.values())
    matmuls = {piece["kind"]: piece for piece in seen.longest if piece["name"] == "aten::mm"}
    assert matmuls["matmul"]["ms"] <= seen.breakdown_ms["matmul"]
    assert matmuls["matmul"]["calls"] >= len(make_run().model.blocks)


def test_a_kernel_counts_once_though_a_call_of_the_driver_bears_its_launchers_number() -> None:
    """The profiler numbers operators and driver calls apart, and hands kernels to both where numbers meet."""

    def event(name: str, device: Any, kernels: list[Any], took_us: float = 0.0) -> Any:
        span = SimpleNamespace(elapsed_us=lambda: took_us)
        return SimpleNamespace(
            name=name,
            device_type=device,
            kernels=kernels,
            cpu_parent=None,
            is_user_annotation=False,
            time_range=span,
        )

    kernel = SimpleNamespace(name="nvjet_matmul", duration=1000.0)
    events = [
        event("Command Buffer Full", DeviceType.CPU, [kernel]),
        event("cuLaunchKernelEx", DeviceType.CPU, [kernel]),
        event("rush::cross_entropy", DeviceType.CPU, [kernel]),
        event("nvjet_matmul", DeviceType.CUDA, [], 1000.0),
        event("nvjet_matmul", DeviceType.CUDA, [], 3000.0),  # replayed: nobody's
    ]
    found = {(piece.kind, piece.ms, piece.calls) for piece in kernel_times(events, on_gpu=True)}
    assert found == {("loss", 1.0, 1), ("matmul", 3.0, 1)}


@pytest.mark.gpu
def test_on_a_gpu_no_kernel_counts_twice() -> None:
    seen = watched("amp_bf16", "flash_attention", "fused_adamw", steps=3, machine=probe("cuda"))
    counted: dict[str, float] = {}
    for piece in seen.longest:
        counted[piece["name"]] = counted.get(piece["name"], 0.0) + 3 * piece["ms"]
    for name, ms in counted.items():
        assert ms <= 1.001 * sum(took for full, took in seen.kernels.items() if full.startswith(name)), name


def test_garbage_from_before_does_not_count_against_what_a_pass_keeps() -> None:
    """An earlier profile knows its size, and the collector may come by in the middle of a pass."""

    class Ring:
        def __init__(self) -> None:
            self.own, self.values = self, torch.ones(1_000_000)

    def collect(module: Any, given: Any) -> None:
        gc.collect()

    run = make_run()
    run.model.blocks[0].register_forward_pre_hook(collect)
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True):
            Ring()
        with make_loader(run) as loader:
            seen = observe(run, lambda: list(loader.next_step()), steps=1)
    finally:
        gc.enable()
    assert seen.held_bytes == pytest.approx(plain().held_bytes, rel=0.05)


def test_what_is_kept_for_the_backward_pass_is_measured_and_recomputation_shrinks_it() -> None:
    full, selective = watched("checkpoint_full"), watched("checkpoint_selective")
    assert full.held_bytes < selective.held_bytes < plain().held_bytes
    # Two blocks' inputs, the embedding's output and the loss's logits in fp32, at the least.
    assert full.held_bytes > 128 * 257 * 4
    assert full.block_forwards > 1.8
    half = watched("{name='checkpoint_selective', keep='half'}")
    assert full.held_bytes < half.held_bytes < selective.held_bytes
    assert 1.3 < half.block_forwards < 1.6
    assert selective.block_forwards == 1.0  # the kept matmuls are handed out, not computed again


def test_a_step_replayed_from_a_recording_is_told_by_its_eager_twin() -> None:
    run = make_run("accumulate")

    def replayed(batch: Batch, share: Tensor) -> Tensor:
        """Leaves gradients but shows no operator of a model, as a recording does."""
        for parameter in run.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return torch.zeros(())

    run.micro_pass = replayed
    with make_loader(run) as loader:
        seen = observe(run, lambda: list(loader.next_step()), steps=1)
    assert seen.eager_step
    assert seen.matmul_dtypes == {"float32"}
    assert seen.block_forwards == 1.0
    assert run.micro_pass is replayed, "what was taken off for the twin is on again"
    assert all(p.grad is None for p in run.model.parameters())


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["aten::linear", "aten::addmm"], "matmul"),
        (["nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT"], "matmul"),
        (["void cutlass::Kernel2<cutlass_80_simt_sgemm_128x64_8x5_nt_align1>"], "matmul"),
        (["triton_tem_fused_mm_12"], "matmul"),
        (["aten::bmm"], "attention"),
        (["aten::softmax", "aten::_softmax"], "attention"),
        (["void pytorch_flash::flash_fwd_kernel<...>"], "attention"),
        (["cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7"], "attention"),
        (["triton_tem_fused_flex_attention_0"], "attention"),
        (["triton_per_fused__softmax_masked_fill_3"], "attention"),
        (["aten::cross_entropy_loss", "aten::log_softmax", "aten::_log_softmax"], "loss"),
        (["autograd::engine::evaluate_function: LogSoftmaxBackward0", "aten::mul"], "loss"),
        (["void cunn_SoftMaxForward<4, float, LogSoftMaxForwardEpilogue>(...)"], "loss"),
        (["triton_red_fused__log_softmax_nll_loss_forward_7"], "loss"),
        (["Optimizer.step#AdamW.step", "aten::mul_"], "optimizer"),
        (["void multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>"], "optimizer"),
        (["aten::_foreach_norm"], "optimizer"),
        (["Memcpy HtoD (Pinned -> Device)"], "data"),
        (["aten::embedding", "aten::index_select"], "other"),
        (["aten::add"], "norm_elementwise"),
        (["triton_poi_fused_mul_silu_5"], "norm_elementwise"),
        (["void at::native::vectorized_elementwise_kernel<4, ...>"], "norm_elementwise"),
        # The compiler's half of a softmax, of the attention or of the loss: nobody can tell.
        (["triton_red_fused_prepare_softmax_online_2"], "norm_elementwise"),
        (["## Call CompiledFxGraph f3x ##"], "norm_elementwise"),
        (["rush::forward"], "other"),
    ],
)
def test_time_is_classed_by_name(names: list[str], kind: str) -> None:
    assert classify(names) == kind
