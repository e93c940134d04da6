"""Every topic on a CUDA device, quickly: it runs, it explains itself, and the figures are not absurd."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from rush.explain import ExplainSettings, find
from rush.explain.records import Explanation, explain, make
from rush.hardware import probe

pytestmark = [
    pytest.mark.alone,
    pytest.mark.gpu,
    # Compilers and libraries give advice (tensor cores, hashing, first use of a profiler), other on every version.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@cache
def measured(name: str) -> Explanation:
    return explain(make(find(name), ExplainSettings(probe("cuda"), "cuda", quick=True)))


def data(name: str) -> Any:
    return measured(name).record["data"]


@pytest.mark.parametrize(
    "name",
    [
        "memory",
        "fusion",
        "attention",
        "roofline",
        "precision",
        "batch",
        "occupancy",
        "cpu-gpu",
        "links",
        "flash-attention",
    ],
)
def test_a_quick_measurement_explains_itself(name: str) -> None:
    found = measured(name)
    assert found.record["device"] == "cuda"
    assert found.record["seconds"] < 30, found.record["seconds"]
    assert 3 <= len(found.words) <= 6, found.words
    torch.cuda.synchronize()


def test_latency_and_bandwidth_are_those_of_a_gpu() -> None:
    rows = data("memory")
    latencies = [row["seconds"]["median"] for row in rows["latency"]]
    assert all(5e-9 < value < 5e-6 for value in latencies), latencies
    assert latencies[-1] > latencies[0], latencies
    speeds = [row["moved"] / row["seconds"]["median"] for row in rows["bandwidth"]]
    assert all(5e10 < value < 5e13 for value in speeds), speeds
    assert len(rows["links"]) == 4
    assert rows["fetch"]["median"] < 1e-3


def test_fusion_compiles_and_computes_the_chain() -> None:
    assert data("fusion")["missing"] is None
    assert data("fusion")["agrees"] is True


def test_both_attentions_ran_and_memory_was_counted() -> None:
    for row in data("attention")["rows"]:
        assert row["status"] == "ok", row
        assert row["peak_bytes"] > 0
    plain, flash = (
        [r for r in data("attention")["rows"] if r["way"] == way][-1] for way in ("plain", "flash")
    )
    assert plain["peak_bytes"] > 2 * flash["peak_bytes"]


def test_plain_attention_that_does_not_fit_is_a_result() -> None:
    from rush.explain.attention import measured_row

    settings = ExplainSettings(probe("cuda"), "cuda", quick=True)
    row = measured_row("plain", 2**19, 16, settings)  # a score matrix of 8 TiB
    assert row["status"] == "out of memory", row
    assert torch.cuda.memory_allocated() < 2**33


def test_the_roofline_has_every_operation_in_half_precision() -> None:
    assert data("roofline")["dtype"] == "bfloat16"
    kinds = {op["kind"] for op in data("roofline")["ops"]}
    assert kinds == {"matmul", "attention", "elementwise", "optimizer"}


def test_rates_exist_for_the_formats_of_the_device() -> None:
    rates = {row["name"]: row["rate"] for row in data("precision")["rows"]}
    assert rates["fp32"]
    assert rates["fp16"]
    if torch.cuda.get_device_capability() >= (8, 9):
        assert rates["tf32"]
        assert rates["bf16"]
        assert rates["fp8 e4m3"]


def test_one_program_more_than_a_wave_was_measured() -> None:
    found = {row["tasks"]: row["seconds"]["median"] for row in data("occupancy")["tasks"]}
    workers = torch.cuda.get_device_properties(0).multi_processor_count
    assert {workers, workers + 1} <= set(found)
    assert found[2 * workers] > found[workers] * 1.2, found


def test_lanes_that_differ_cost_time_and_whole_warps_do_not() -> None:
    seconds = {(row["ways"], row["whole_warps"]): row["seconds"]["median"] for row in data("cpu-gpu")["ways"]}
    assert seconds[32, False] > 8 * seconds[1, False], seconds
    assert seconds[32, True] < 2 * seconds[1, True], seconds


def test_a_gpu_needs_many_chains_in_flight() -> None:
    rows = data("cpu-gpu")["device_chains"]
    rates = [row["chains"] * row["rounds"] / row["seconds"]["median"] for row in rows]
    assert max(rates) > 1000 * rates[0], rates


def test_both_orders_ran_and_the_second_shares_a_head_among_multiprocessors() -> None:
    found = {
        (row["way"], row["heads"]): row["seconds"]["median"] for row in data("flash-attention")["sharing"]
    }
    assert found["second", 1] < 0.5 * found["first", 1], found
    assert {row["way"] for row in data("flash-attention")["rows"]} == {"plain", "first", "second"}
