"""Exchanges between real processes: right figures, honest failures, and no process left behind."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from rush.errors import MachineError, RecipeError
from rush.hardware import Ceilings, Collective, ceilings, collective_rank, collectives, probe
from rush.hardware.collectives import measure_collectives
from rush.hardware.machine import Device
from rush.hardware.samples import Sample


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


@pytest.fixture
def no_new_children() -> Iterator[None]:
    """Nothing that the test started is left; what other tests keep alive (a compiler's workers) does not count."""
    before = {process.pid for process in children()}
    yield
    assert {process.pid for process in children()} <= before


@pytest.mark.parametrize(
    ("operation", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("all_reduce", 8, 1.75),
        ("all_gather", 2, 0.5),
        ("all_gather", 8, 0.875),
    ],
)
def test_the_link_carries_what_a_ring_sends_through_it(operation: str, ranks: int, factor: float) -> None:
    slow, fast = Sample("small", 10.0, (1.0, 2.0, 9.0)), Sample("large", 100.0, (4.0, 5.0, 6.0))
    row = Collective(operation, "nccl", ranks, (slow, fast))
    assert row.bytes_per_s == 20.0
    assert row.bus_bytes_per_s == pytest.approx(20.0 * factor)


@pytest.mark.slow
def test_two_processes_run_collectives_over_gloo_and_end(tmp_path: Path) -> None:
    machine = probe("cpu")
    before = {process.pid for process in children()}
    found = ceilings(machine, (), bandwidth=False, collectives=2, folder=tmp_path)
    assert {process.pid for process in children()} == before
    assert [(row.operation, row.backend, row.ranks) for row in found.collectives] == [
        ("all_reduce", "gloo", 2),
        ("all_gather", "gloo", 2),
    ]
    for row in found.collectives:
        assert [sample.amount for sample in row.samples][:2] == [2**16, 2**20]
        assert all(3 <= len(sample.seconds) <= 30 and min(sample.seconds) > 0 for sample in row.samples)
        assert 1e6 < row.bytes_per_s < 1e12
    again = ceilings(machine, (), bandwidth=False, collectives=2, folder=tmp_path)
    assert again == found
    assert ceilings(machine, (), bandwidth=False, folder=tmp_path).collectives == found.collectives


@pytest.mark.usefixtures("no_new_children")
def test_a_rank_that_dies_is_named_and_the_others_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys, time; sys.exit('no such interface') if sys.argv[3] == '1' else time.sleep(100)"
    monkeypatch.setattr(collectives, "_CHILD", code)
    began = time.monotonic()
    with pytest.raises(MachineError, match="process 1 of 2 ended with 1: no such interface"):
        measure_collectives(probe("cpu"), 2)
    assert time.monotonic() - began < 20


PARENT = """
from rush.hardware import collectives, probe
work = "from rush.hardware.collective_rank import main"
assert work in collectives._CHILD
collectives._CHILD = collectives._CHILD.replace(work, "import time; time.sleep(100)")
collectives.measure_collectives(probe("cpu"), 2)
"""


@pytest.mark.slow
def test_ranks_do_not_outlive_a_killed_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], cwd=Path(__file__).parents[2])
    deadline = time.monotonic() + 60
    family: list[psutil.Process] = []
    while len(family) < 2:
        assert time.monotonic() < deadline
        assert parent.poll() is None
        time.sleep(0.02)
        family = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    assert psutil.wait_procs(family, timeout=30)[1] == []


@pytest.mark.usefixtures("no_new_children")
def test_ranks_that_never_end_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "_CHILD", "import time; time.sleep(100)")
    monkeypatch.setattr(collectives, "START_LIMIT_S", 0.2)
    with pytest.raises(MachineError, match="did not end in time"):
        measure_collectives(probe("cpu"), 2, budget_s=0.1)


def test_a_sum_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(everyone: torch.Tensor, mine: torch.Tensor) -> None:
        everyone.copy_(torch.tensor([1.0, 2.0]).repeat_interleave(1000))

    monkeypatch.setattr(collective_rank.dist, "all_gather_into_tensor", gather)
    monkeypatch.setattr(collective_rank.dist, "all_reduce", lambda mine: mine.fill_(3.0))
    collective_rank.verify(0, 2, torch.device("cpu"))
    monkeypatch.setattr(collective_rank.dist, "all_reduce", lambda mine: mine)
    with pytest.raises(SystemExit, match="return wrong numbers"):
        collective_rank.verify(0, 2, torch.device("cpu"))


def test_impossible_numbers_of_processes_are_refused_before_anything_starts() -> None:
    cpu = probe("cpu")
    for ranks in (-1, 0, 1):
        with pytest.raises(RecipeError, match="at least 2"):
            measure_collectives(cpu, ranks)
    with pytest.raises(MachineError, match="Ask for 2 to"):
        measure_collectives(cpu, max(2, cpu.cpu.num_threads) + 1)
    gpu = Device("NVIDIA H200", 150, (9, 0), 132, 18)
    with pytest.raises(MachineError, match=r"this machine has 2 GPUs. Ask for 2 to 2"):
        measure_collectives(replace(cpu, device="cuda", devices=(gpu, gpu)), 3)
    with pytest.raises(MachineError, match="Leave them out"):
        measure_collectives(replace(cpu, device="cuda", devices=(gpu,)), 2)
    with pytest.raises(MachineError, match="Apple"):
        measure_collectives(replace(cpu, device="mps"), 2)


SAMPLE = {"case": "8x8x8", "amount": 1024.0, "seconds": [2.0, 1.0, 4.0]}


def test_the_record_of_an_older_version_without_collectives_is_read() -> None:
    old = {
        "version": 1,
        "fingerprint": "f",
        "measured_at": 0.0,
        "matmul": {"float32": [SAMPLE]},
        "bandwidth": {"copy": SAMPLE},
        "unsupported": {"tf32": "no tensor cores"},
    }
    found = Ceilings.from_dict(old)
    assert found.collectives == ()
    assert found.load is found.launching is None
    assert found.to_dict() == {**old, "collectives": [], "load": None, "launching": None}


def test_the_rates_that_other_records_embed_have_the_documented_form() -> None:
    record = {
        "version": 1,
        "fingerprint": "f",
        "measured_at": 86_400.0,
        "matmul": {"float32": [SAMPLE, {**SAMPLE, "amount": 2048.0}]},
        "bandwidth": {"copy": SAMPLE, "host_to_device": {**SAMPLE, "amount": 2.0}},
        "unsupported": {},
        "collectives": [{"operation": "all_reduce", "backend": "nccl", "ranks": 4, "samples": [SAMPLE]}],
        "load": 0.25,
        "launching": {**SAMPLE, "amount": 500.0},
    }
    found = Ceilings.from_dict(json.loads(json.dumps(record)))
    assert found.to_dict() == record
    assert found.rates() == {
        "matmul": {"float32": 1024.0},
        "copy_bytes_per_s": 512.0,
        "transfers_bytes_per_s": {"host_to_device": 1.0},
        "collectives": [
            {"operation": "all_reduce", "backend": "nccl", "ranks": 4, "bytes_per_s": 512.0, "bus_bytes_per_s": 768.0}
        ],
        "launch_s": 0.004,
        "measured_at": "1970-01-02T00:00:00+00:00",
    }  # fmt: skip
    nothing = Ceilings("f", 0.0).rates()
    assert (nothing["matmul"], nothing["copy_bytes_per_s"], nothing["collectives"]) == ({}, None, [])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it takes two GPUs")
def test_nccl_between_gpus_is_faster_than_a_network_card(tmp_path: Path) -> None:
    machine = probe("cuda")
    found = ceilings(machine, (), bandwidth=False, collectives=machine.num_devices, folder=tmp_path)
    assert {row.backend for row in found.collectives} == {"nccl"}
    assert all(row.bus_bytes_per_s > 2e9 for row in found.collectives)
