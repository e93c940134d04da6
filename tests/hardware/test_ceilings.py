"""Measured rates: right arithmetic, bounded time, kept with their age, no trace in the run's randomness."""

from __future__ import annotations

import json
import time
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch

from rush.errors import MachineError
from rush.files import cache_folder
from rush.hardware import Ceilings, ceilings, measured_matmul_rate, probe
from rush.hardware import measure as stopwatch
from rush.hardware.conditions import load_now
from rush.hardware.launch_rate import launching
from rush.hardware.samples import Sample


@pytest.fixture(autouse=True)
def quick_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a test does not say how long to measure."""
    monkeypatch.setattr(stopwatch, "matmul", partial(stopwatch.matmul, budget_s=0.05))
    monkeypatch.setattr(stopwatch, "bandwidth", partial(stopwatch.bandwidth, budget_s=0.05))
    monkeypatch.setattr(import_module("rush.hardware.ceilings"), "load_now", partial(load_now, seconds=0.01))


def test_the_rate_is_the_amount_over_the_median_time() -> None:
    assert Sample("x", 100.0, (1.0, 2.0, 50.0)).rate == 50.0
    assert Sample("x", 100.0, (1.0, 3.0)).rate == 50.0
    assert Sample("x", 100.0, (4.0,)).rate == 25.0


def test_the_float32_rate_agrees_with_a_plain_timing_of_matmuls() -> None:
    samples = stopwatch.matmul("cpu", "float32", budget_s=0.6)
    assert not isinstance(samples, str)
    assert len(samples) >= 3
    best = max(sample.rate for sample in samples)
    left, right = torch.randn(512, 512), torch.randn(512, 512)
    times = []
    for _ in range(12):
        began = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - began)
    plain = 2 * 512**3 / min(times)
    # Other processes share this machine's cores, so only the order of magnitude can be demanded.
    assert plain / 10 < best < plain * 10


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_dtype_that_is_slow_here_still_ends_near_its_budget(dtype: str) -> None:
    stopwatch.matmul("cpu", dtype, budget_s=0.05)
    began = time.perf_counter()
    samples = stopwatch.matmul("cpu", dtype, budget_s=0.5)
    assert time.perf_counter() - began < 3
    assert samples
    assert all(
        sample.rate > 0 and len(sample.seconds) >= 3 for sample in samples if isinstance(sample, Sample)
    )


def test_the_copy_rate_counts_reading_and_writing() -> None:
    sample = stopwatch.bandwidth("cpu", budget_s=0.2)["copy"]
    assert sample.amount == 2 * 2**28
    assert 5e8 < sample.rate < 5e12


def test_unsupported_matmul_dtypes_of_a_cpu_have_a_reason(tmp_path: Path) -> None:
    found = ceilings(probe("cpu"), ("tf32", "float8", "int8"), bandwidth=False, folder=tmp_path)
    assert found.matmul == {}
    assert set(found.unsupported) == {"tf32", "float8", "int8"}
    assert found.matmul_rate("tf32") is None


def test_measuring_does_not_change_the_random_generators() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    stopwatch.matmul("cpu", "float32", budget_s=0.05)
    stopwatch.bandwidth("cpu", budget_s=0.05)
    launching("cpu", budget_s=0.05)
    assert torch.equal(torch.rand(3), expected)


def test_a_second_call_reads_the_cache_and_measures_only_what_is_missing(tmp_path: Path) -> None:
    machine = probe("cpu")
    first = ceilings(machine, ("float32",), bandwidth=False, folder=tmp_path)
    again = ceilings(machine, ("float32",), bandwidth=False, folder=tmp_path)
    assert again == first
    more = ceilings(machine, ("float32", "tf32"), bandwidth=False, folder=tmp_path)
    assert more.matmul == first.matmul
    assert "tf32" in more.unsupported
    assert len(list(tmp_path.iterdir())) == 1


def test_refreshing_measures_again_and_the_age_starts_anew(tmp_path: Path) -> None:
    machine = probe("cpu")
    first = ceilings(machine, ("float32",), bandwidth=False, folder=tmp_path)
    path = next(tmp_path.iterdir())
    old = {**first.to_dict(), "measured_at": time.time() - 3600}
    path.write_text(json.dumps(old))
    kept = ceilings(machine, ("float32",), bandwidth=False, folder=tmp_path)
    assert 3600 <= kept.age_s() < 3700
    fresh = ceilings(machine, ("float32",), bandwidth=False, folder=tmp_path, refresh=True)
    assert fresh.age_s() < 600
    assert fresh.matmul != kept.matmul


def test_another_machine_or_another_number_of_threads_has_its_own_measurement(tmp_path: Path) -> None:
    machine = probe("cpu")
    ceilings(machine, ("tf32",), bandwidth=False, folder=tmp_path)
    other = type(machine)(**{**vars(machine), "torch": "2.10.0"})
    ceilings(other, ("tf32",), bandwidth=False, folder=tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        ceilings(machine, ("tf32",), bandwidth=False, folder=tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"version": 1}', '{"version": 99}', '{"version": 1, "matmul": 3']
)
def test_a_broken_cache_is_reported_and_measured_again(tmp_path: Path, content: str) -> None:
    machine = probe("cpu")
    ceilings(machine, ("tf32",), bandwidth=False, folder=tmp_path)
    path = next(tmp_path.iterdir())
    path.write_text(content)
    heard: list[str] = []
    found = ceilings(machine, ("tf32",), bandwidth=False, folder=tmp_path, on_problem=heard.append)
    assert "tf32" in found.unsupported
    assert len(heard) == 1
    assert str(path) in heard[0]
    assert Ceilings.from_dict(json.loads(path.read_text())) == found


def test_a_cache_that_cannot_be_written_is_reported_and_the_result_still_comes(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    heard: list[str] = []
    found = ceilings(
        probe("cpu"), ("tf32",), bandwidth=False, folder=tmp_path / "file", on_problem=heard.append
    )
    assert "tf32" in found.unsupported
    assert "RUSH_CACHE" in heard[0]


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUSH_CACHE", "/somewhere")
    assert cache_folder() == Path("/somewhere")
    monkeypatch.delenv("RUSH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/rush")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "rush"


def test_the_rate_of_a_run_is_a_number_or_a_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RUSH_CACHE", str(tmp_path))
    assert measured_matmul_rate(probe("cpu"), "float32") > 1e8
    with pytest.raises(MachineError, match="tensor cores"):
        measured_matmul_rate(probe("cpu"), "tf32")


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_the_ceilings_lie_below_the_datasheet_and_in_the_right_order(tmp_path: Path) -> None:
    from rush.hardware import datasheet_peak

    machine = probe("cuda")
    before = torch.backends.cuda.matmul.fp32_precision
    found = ceilings(machine, folder=tmp_path)
    assert torch.backends.cuda.matmul.fp32_precision == before
    for dtype in found.matmul:
        peak, rate = datasheet_peak(machine, dtype), found.matmul_rate(dtype)
        assert rate is not None
        assert peak is None or 0.3 * peak < rate < 1.05 * peak, dtype
    pinned, plain = found.bytes_per_s("host_to_device_pinned"), found.bytes_per_s("host_to_device")
    copy = found.bytes_per_s("copy")
    assert pinned is not None
    assert plain is not None
    assert copy is not None
    assert plain < pinned < copy


def test_what_a_call_of_an_operator_takes_is_measured_and_kept_and_older_files_do_without(
    tmp_path: Path,
) -> None:
    sample = launching("cpu", budget_s=0.3)
    # At least the six products of each of four layers forward, and two each backward.
    assert 4 * 18 < sample.amount < 2000
    assert launching("cpu", budget_s=0.05).amount == sample.amount
    found = Ceilings("here", 0.0, launching=sample)
    assert found.rates()["launch_s"] == pytest.approx(
        sorted(sample.seconds)[len(sample.seconds) // 2] / sample.amount, rel=0.2
    )
    assert Ceilings.from_dict(found.to_dict()) == found
    older = {key: value for key, value in found.to_dict().items() if key != "launching"}
    assert Ceilings.from_dict(older).launch_s is None
    began = time.perf_counter()
    first, second = torch.ones(8, requires_grad=True), torch.ones(8)
    for _ in range(200):
        (first * second).sum().backward()
    # A pass of some eight operators: the order of magnitude is that of any eager code.
    plain = (time.perf_counter() - began) / 200 / 8
    assert plain / 20 < 1 / sample.rate < plain * 20
