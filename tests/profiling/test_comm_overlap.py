"""Exchanges that nothing hides, from made-up profiles whose answer is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType  # type: ignore[attr-defined]

from rush.profiling.comm_overlap import comm_time, merged, subtract


def event(name: str, start: float, end: float, thread: int = 1, device: Any = DeviceType.CPU) -> Any:
    return SimpleNamespace(
        name=name,
        thread=thread,
        device_type=device,
        is_user_annotation=False,
        time_range=SimpleNamespace(start=start, end=end),
    )


def test_spans_are_joined_and_cut_out_of_each_other() -> None:
    assert merged([(5, 7), (0, 2), (1, 3), (3, 4), (6, 6)]) == [(0, 4), (5, 7)]
    assert subtract([(0, 10)], [(2, 3), (5, 6)]) == [(0, 2), (3, 5), (6, 10)]
    assert subtract([(0, 4), (6, 9)], [(-1, 1), (3, 7), (8, 20)]) == [(1, 3), (7, 8)]
    assert subtract([(0, 4)], [(0, 4)]) == []
    assert subtract([(4, 6)], [(0, 1), (1.5, 2), (5, 5.5)]) == [(4, 5), (5.5, 6)]


def test_on_a_cpu_what_runs_beside_gloo_hides_it() -> None:
    events = [
        event("rush::forward", 0, 2000),
        event("aten::mm", 0, 1000),
        event("gloo:all_reduce", 500, 3000, thread=7),
        event("aten::copy_", 2500, 3000, thread=7),  # gloo's own copy hides nothing
        # An operator on a sharded tensor, which waits inside for its exchange.
        event("aten::embedding", 4000, 6000),
        event("_c10d_functional::wait_tensor", 4500, 6000),
        event("gloo:all_gather", 4000, 5500, thread=8),
    ]
    found = comm_time(events, steps=2, on_gpu=False)
    assert found.total_ms == pytest.approx((2.5 + 1.5) / 2)
    assert found.exposed_ms == pytest.approx((2.0 + 1.0) / 2)


def test_on_a_gpu_kernels_hide_those_of_nccl() -> None:
    events = [
        event("rush::forward", 0, 10_000),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 0, 4000, device=DeviceType.CUDA),
        event("ncclDevKernel_AllGather_RING_LL", 3000, 5000, device=DeviceType.CUDA),
        event("void cutlass_gemm", 1000, 2000, device=DeviceType.CUDA),
        event("void elementwise", 1500, 3500, device=DeviceType.CUDA),
    ]
    found = comm_time(events, steps=1, on_gpu=True)
    assert (found.total_ms, found.exposed_ms) == (pytest.approx(5.0), pytest.approx(2.5))


def test_one_rank_exchanges_nothing() -> None:
    found = comm_time([event("rush::forward", 0, 10), event("aten::mm", 0, 10)], steps=1, on_gpu=False)
    assert (found.total_ms, found.exposed_ms) == (0.0, 0.0)
