"""The conditions noted beside a measurement, against a stand-in for the driver and the system's own files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rush.hardware import Conditions, conditions, probe
from rush.hardware.conditions import load_now, read_gpu


def driver(bits: int = 0, pids: tuple[int, ...] = (), *, old: bool = False) -> Any:
    name = "Throttle" if old else "Event"
    return SimpleNamespace(
        NVML_CLOCK_SM=1, NVML_TEMPERATURE_GPU=0,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetClockInfo=lambda handle, kind: 1980 if (handle, kind) == ("GPU-a", 1) else 0,
        nvmlDeviceGetTemperature=lambda handle, kind: 61 if (handle, kind) == ("GPU-a", 0) else 0,
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [SimpleNamespace(pid=pid) for pid in pids],
        **{f"nvmlDeviceGetCurrentClocks{name}Reasons": lambda handle: bits},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("bits", "throttle"),
    [
        (0x0, ()),
        (0x1, ()),
        (0x2, ()),
        (0x4, ("power cap",)),
        (0x4 | 0x40, ("power cap", "temperature (hardware)")),
    ],
)
@pytest.mark.parametrize("old", [False, True])
def test_clock_temperature_and_reasons_come_from_the_driver(
    bits: int, throttle: tuple[str, ...], old: bool
) -> None:
    found = read_gpu(driver(bits, old=old), "GPU-a", {1}, True, 0.5)
    assert found == Conditions(1980, 61, throttle, 0, 0.5)


@pytest.mark.parametrize(
    ("pids", "own", "computing", "foreign"),
    [
        ((), {7}, True, 0),
        ((7,), {7}, True, 0),
        ((7, 8), {7}, True, 1),
        ((7, 8), {7, 8}, True, 0),
        ((500,), {7}, True, 0),  # known under another number in this container
        ((500, 501), {7}, True, 1),
        ((500,), {7}, False, 1),
    ],
)
def test_processes_of_others_are_counted_and_our_own_are_not(
    pids: tuple[int, ...], own: set[int], computing: bool, foreign: int
) -> None:
    assert read_gpu(driver(0, pids), "GPU-a", own, computing, None).foreign_processes == foreign


def test_on_a_cpu_the_load_is_known_and_the_rest_is_not() -> None:
    machine = probe("cpu")
    found = conditions(machine)
    assert found.load == pytest.approx(
        float(Path("/proc/loadavg").read_text().split()[0]) / len(os.sched_getaffinity(0)), abs=1.0
    )
    assert (found.clock_mhz, found.temperature_c, found.throttle, found.foreign_processes) == (
        None,
        None,
        (),
        None,
    )
    assert set(json.loads(json.dumps(found.to_dict()))) == {
        "clock_mhz", "temperature_c", "throttle", "foreign_processes", "load"
    }  # fmt: skip


@pytest.mark.gpu
def test_a_gpu_reports_its_conditions() -> None:
    found = conditions(probe("cuda"))
    assert found.clock_mhz is not None
    assert found.clock_mhz > 100
    assert found.temperature_c is not None
    assert 10 < found.temperature_c < 100


def test_programs_that_compute_now_are_seen_at_once() -> None:
    machine = probe("cpu")
    spinning = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(machine.cpu.num_threads)
    ]
    try:
        time.sleep(0.2)
        assert load_now(machine, 0.5) > 0.75
    finally:
        for process in spinning:
            process.kill()
            process.wait()
