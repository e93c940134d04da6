"""The kernel bench: wrong results are caught, contenders get the same inputs, losses of an op cost that op alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rush.bench import kernel_bench, kernel_check, kernel_measure, kernel_process
from rush.bench.kernel_measure import INTERPRETED, BenchDevice, measure_size
from rush.bench.kernel_targets import describe, targets_of
from rush.errors import KernelRefusal, RecipeError
from rush.hardware.measure import bandwidth
from rush.hardware.stopwatch import Effort, TimedCase, take_turns
from rush.kernels import cpu
from rush.kernels import study as studies
from rush.kernels.study import Contender, Pass, Size, Study, Target, Work
from rush.records.kernels import KernelRow, read_kernels

CPU = torch.device("cpu")
LITTLE = Effort(least=3, most=3, budget_s=0.0)
SIZE = Size("6 × 10", {"rows": 6, "columns": 10})


def square(x: Tensor) -> Tensor:
    return x * x


def make(size: Size, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    return {"x": studies.normal(device, 1, size["rows"], size["columns"]).to(dtype).requires_grad_()}


def off(x: Tensor) -> Tensor:
    return x * x * 1.001


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * ctx.saved_tensors[0]  # the factor 2 is missing


class Overwriting(torch.autograd.Function):
    """Right, but it writes into its input and into the gradient that flows in, as some libraries do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.detach().clone())
        out = x * x
        x.data.fill_(7.0)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        kept = gradient.clone()
        gradient.data.fill_(math.nan)
        return 2 * kept * ctx.saved_tensors[0]


def wrong_gradient(x: Tensor) -> Any:
    return WrongGradient.apply(x)


def overwriting(x: Tensor) -> Any:
    return Overwriting.apply(x)


def raises(x: Tensor) -> Tensor:
    raise ValueError("out of order")


def refuses(x: Tensor) -> Tensor:
    raise KernelRefusal("rows of ten are not for me.")


def baseline(name: str, call: Any, **rest: Any) -> Contender:
    return Contender(name, "baseline", call, **rest)


def a_study(*baselines: Contender, passes: tuple[Pass, ...] = ("forward", "both")) -> Study:
    plain = Contender("plain torch", "plain", square)
    return Study(
        op="square",
        about="",
        bound="memory",
        axis="columns",
        sizes=(SIZE,),
        small=(SIZE,),
        make=make,
        reference=square,
        contenders=(Contender("rush", "ours", square), plain, *baselines),
        work=lambda size, element, step: Work(float(size["rows"] * size["columns"] * element)),
        passes=passes,
    )


def measured(
    *baselines: Contender, passes: tuple[Pass, ...] = ("forward", "both")
) -> dict[tuple[str, str], KernelRow]:
    place = BenchDevice(CPU, {"copy_bytes_per_s": 1e9}, LITTLE)
    rows = measure_size(a_study(*baselines, passes=passes), SIZE, place, lambda text: None)
    return {(row["contender"], row["step"]): row for row in rows}


def verdict(row: KernelRow) -> str:
    assert row["correctness"] is not None
    word: str = row["correctness"]["verdict"]
    return word


def test_a_result_off_by_a_thousandth_and_a_wrong_gradient_are_called_different() -> None:
    rows = measured(baseline("off", off), baseline("gradient", wrong_gradient), baseline("same", square))
    assert verdict(rows["same", "both"]) == "equal"
    assert verdict(rows["plain torch", "both"]) == "equal"
    assert verdict(rows["off", "forward"]) == "different"
    wrong = rows["gradient", "both"]["correctness"]
    assert wrong is not None
    assert wrong["verdict"] == "different"
    assert wrong["worst"] == "gradient of x"
    assert wrong["error"] == pytest.approx(0.5, rel=1e-3)


def test_a_result_of_another_shape_or_without_its_gradient_is_different() -> None:
    rows = measured(
        baseline("short", lambda x: (x * x)[:3]),
        baseline("cut off", lambda x: (x * x).detach()),
        baseline("not finite", lambda x: x * x / 0),
    )
    assert {verdict(rows[name, "forward"]) for name in ("cut off", "not finite")} == {"different"}
    assert rows["short", "forward"]["status"] == "failed"  # the gradient that flows in does not fit


def test_a_contender_that_overwrites_its_inputs_does_not_affect_the_others() -> None:
    rows = measured(baseline("overwriting", overwriting), baseline("after it", square))
    assert verdict(rows["overwriting", "both"]) == "equal"
    assert verdict(rows["after it", "both"]) == "equal"
    assert rows["after it", "both"]["status"] == "ok"


def test_what_a_contender_cannot_do_is_a_row_with_a_reason() -> None:
    rows = measured(
        baseline("raises", raises),
        baseline("refuses", refuses),
        baseline("absent", raises, absent=lambda device: "it is not installed"),
    )
    assert rows["raises", "both"]["status"] == "failed"
    assert rows["raises", "both"]["reason"] == "ValueError: out of order"
    assert rows["refuses", "both"]["status"] == "refused"
    assert rows["absent", "both"]["status"] == "absent"
    assert rows["absent", "both"]["reason"] == "it is not installed"
    assert rows["plain torch", "both"]["status"] == "ok"


def test_a_contender_that_fails_only_under_the_clock_leaves_the_others_timed() -> None:
    calls = []

    def third_time(x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) >= 2:
            raise ValueError("worn out")
        return x * x

    rows = measured(baseline("worn", third_time))
    assert rows["worn", "forward"]["status"] == "failed"
    assert rows["worn", "forward"]["time_ms"] is None
    assert rows["plain torch", "forward"]["status"] == "ok"


def test_on_a_cpu_our_kernel_is_checked_and_never_given_a_speed() -> None:
    row = measured()["rush", "both"]
    assert row["status"] == "untimed"
    assert row["reason"] == INTERPRETED
    assert row["time_ms"] is None
    assert row["ceiling_fraction"] is None
    assert verdict(row) == "equal"


def test_rates_are_the_least_work_over_the_median() -> None:
    row = measured()["plain torch", "forward"]
    time = row["time_ms"]
    assert time is not None
    assert row["bytes"] == 6 * 10 * 4
    assert row["bytes_per_s"] == pytest.approx(240 / (time["median"] / 1000))
    assert row["ceiling_fraction"] == pytest.approx(240 / (time["median"] / 1000) / 1e9)
    assert len(time["samples"]) == time["n"] == 3


def test_the_three_passes_time_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    def watch(cases: dict[str, TimedCase], device: torch.device, effort: Effort) -> dict[str, list[float]]:
        for name, case in cases.items():
            state = case.setup()
            done = case.timed(state)
            seen[f"{name} {len(seen)}"] = f"{'made' if state else 'nothing'}, {type(done).__name__}"
        return {name: [1.0] for name in cases}

    monkeypatch.setattr(kernel_measure, "take_turns", watch)
    measured(passes=("forward", "backward", "both"))
    assert list(seen.values()) == ["nothing, tuple", "made, dict", "nothing, dict"]


def test_contenders_take_turns() -> None:
    order: list[str] = []

    def case(name: str) -> TimedCase:
        return TimedCase(lambda: None, lambda _: order.append(name))

    found = take_turns({"a": case("a"), "b": case("b")}, CPU, Effort(least=4, most=4, budget_s=0))
    assert order == ["a", "b", *["a", "b"] * 4]  # the first two warm up
    assert {name: len(samples) for name, samples in found.items()} == {"a": 4, "b": 4}
    assert all(sample > 0 for samples in found.values() for sample in samples)


def test_a_sixteen_bit_contender_may_be_off_by_what_plain_torch_is_and_no_more() -> None:
    inputs = {"x": studies.normal(CPU, 1, 64, 64).bfloat16().requires_grad_()}
    expected, grad_outputs = kernel_check.exact_results(square, square, inputs, torch.float64, torch.bfloat16)
    assert 5e-4 < expected.plain_errors["the result"] < 3e-3  # one rounding

    def judged(call: Any) -> str:
        found = kernel_check.results_of(call, kernel_check.fresh(inputs), kernel_check.copies(grad_outputs))
        return str(kernel_check.judge(baseline("r", call), found, expected)["verdict"])

    assert judged(square) == "equal"
    assert judged(lambda x: (x.float() ** 2).bfloat16()) == "equal"
    assert judged(lambda x: x * x * 1.02) == "different"


# Targets.


def row(contender: str, milliseconds: float, fraction: float | None = None, **rest: Any) -> KernelRow:
    samples = [milliseconds * factor for factor in (0.99, 1.0, 1.01)]
    base: dict[str, Any] = {
        "size": SIZE.label,
        "contender": contender,
        "step": "both",
        "status": "ok",
        "reason": None,
        "time_ms": {"median": milliseconds, "ci95": [samples[0], samples[2]], "n": 3, "samples": samples},
        "ceiling_fraction": fraction,
        "beyond_results_bytes": 60,
        "correctness": {"verdict": "equal", "why": ""},
    }
    found: KernelRow = {**base, **rest}  # type: ignore[typeddict-item]
    return found


def judged(target: Target, *rows: KernelRow) -> dict[str, Any]:
    (line,) = targets_of(replace(a_study(), targets=(target,)), [SIZE], rows)
    return line


FASTER = Target("speed", ("both",), at_least=1.0, against="them")


def test_a_speed_is_their_time_over_ours_and_a_time_ours_over_theirs() -> None:
    line = judged(FASTER, row("rush", 2.0), row("them", 3.0))
    assert line["reached"] == pytest.approx(1.5)
    assert line["verdict"] == "reached"
    assert line["ci95"][0] < 1.5 < line["ci95"][1]
    assert line["why"] is None
    assert judged(FASTER, row("rush", 3.0), row("them", 2.0))["verdict"] == "missed"
    assert "close call" in judged(FASTER, row("rush", 2.0), row("them", 2.001))["why"]
    longer = Target("time", ("both",), at_most=1.05, against="them")
    line = judged(longer, row("rush", 2.2), row("them", 2.0))
    assert line["reached"] == pytest.approx(1.1)
    assert line["verdict"] == "missed"
    assert describe(longer) == "time at most 1.05× of them"


def test_a_fast_kernel_that_is_wrong_misses_its_target() -> None:
    line = judged(
        FASTER, row("rush", 1.0, correctness={"verdict": "different", "why": "off"}), row("them", 3.0)
    )
    assert line["verdict"] == "missed"
    assert "not proved equal: off" in line["why"]


def test_without_the_baseline_a_target_is_not_measured_and_gives_the_reason() -> None:
    line = judged(FASTER, row("rush", 1.0), row("them", 1.0, status="absent", reason="not installed"))
    assert line["verdict"] == "not measured"
    assert line["why"] == "them: not installed"
    assert judged(FASTER)["verdict"] == "not measured"


def test_ceilings_and_memory_are_fractions() -> None:
    ceiling = Target("ceiling", ("both",), at_least=0.85)
    assert judged(ceiling, row("rush", 1.0, 0.9))["verdict"] == "reached"
    assert judged(ceiling, row("rush", 1.0, 0.8))["verdict"] == "missed"
    assert judged(ceiling, row("rush", 1.0, None))["verdict"] == "not measured"
    memory = Target("memory", ("both",), at_most=0.1, of=lambda size: 1000.0, of_what="the logits")
    assert judged(memory, row("rush", 1.0))["reached"] == pytest.approx(0.06)
    assert judged(memory, row("rush", 1.0, beyond_results_bytes=101))["verdict"] == "missed"


# The studies that ship.


@pytest.mark.parametrize("name", studies.names())
def test_a_study_is_whole(name: str) -> None:
    study = studies.load(name)
    kinds = [contender.kind for contender in study.contenders]
    assert kinds[0] == "ours"
    assert kinds.count("plain") == 1
    for sizes in (study.sizes, study.small, *([study.on_cpu] if study.on_cpu else [])):
        assert len({size.label for size in sizes}) == len(sizes) > 1
        assert all(study.axis in size.dims for size in sizes)
        for size in sizes:
            parts = [study.work(size, 2, step) for step in ("forward", "backward")]
            whole = study.work(size, 2, "both")
            if "both" in study.passes:
                assert whole.bytes == pytest.approx(sum(part.bytes for part in parts))
                assert whole.flops == pytest.approx(sum(part.flops for part in parts))
            assert (whole.flops > 0) == (study.bound == "matmul")
    names = {contender.name for contender in study.contenders}
    for target in study.targets:
        assert set(target.passes) <= set(study.passes)
        assert (target.at_least is None) != (target.at_most is None)
        assert target.against is None or target.against in names
        assert (target.of is not None) == (target.metric == "memory")
    assert any(size.target for size in study.sizes) or not study.targets


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "cuda_example" else ())  # built by a compiler
        for name in studies.names()
    ],
)
def test_every_contender_of_a_study_that_runs_here_computes_the_reference(name: str) -> None:
    study = studies.load(name)
    size = study.small[0]
    inputs = study.make(size, CPU, torch.float32)
    plain = next(contender for contender in study.contenders if contender.kind == "plain")
    expected, grad_outputs = kernel_check.exact_results(
        study.reference, plain.call, inputs, torch.float64, torch.float32
    )
    again = study.make(size, CPU, torch.float32)
    assert all(torch.equal(inputs[key], again[key]) for key in inputs), (
        "inputs must not depend on the weather"
    )
    tried = 0
    for contender in study.contenders:
        if contender.absent(CPU) is None and not contender.compile and contender.kind != "compiled":
            mine = kernel_check.fresh(inputs)
            found = kernel_check.results_of(contender.call, mine, kernel_check.copies(grad_outputs))
            told = kernel_check.judge(contender, found, expected)
            assert told["verdict"] == "equal", (contender.name, told["why"])
            tried += 1
    assert tried >= 2


def test_names_are_the_folders_with_a_study() -> None:
    root = Path(studies.__file__).parent
    assert studies.names() == sorted(path.parent.name for path in root.glob("*/study.py"))
    assert "rmsnorm" in studies.names()


def test_what_was_measured_is_measured_anew_once_a_library_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernel_process._key("rmsnorm", "machine", True)
    assert kernel_process._key("rmsnorm", "machine", True) == before
    monkeypatch.setattr(
        kernel_process, "version", lambda name: "9.9" if name == "liger-kernel" else metadata.version(name)
    )
    assert kernel_process._key("rmsnorm", "machine", True) != before


# The whole bench, in processes.


def test_an_unknown_kernel_is_refused_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no kernel named 'rmsnrom'.*rmsnorm"):
        kernel_bench.bench_kernels(["rmsnrom"], tmp_path)


@pytest.mark.slow
def test_a_kernel_with_a_side_in_cpp_is_timed_on_a_cpu(tmp_path: Path) -> None:
    if reason := cpu.cannot_run():
        pytest.skip(f"kernels for a CPU cannot run here: {reason}")
    record = kernel_bench.bench_kernels(["gelu"], tmp_path, quick=True, device="cpu")
    assert not record["interpreted"]
    (op,) = record["ops"]
    rows = {(row["size"], row["contender"], row["step"]): row for row in op["rows"]}
    for size in ("2k × 512", "2k × 2048", "2k × 8192"):
        for step in ("forward", "both"):
            row = rows[size, "rush", step]
            assert row["status"] == "ok", row["reason"]
            assert verdict(row) == "equal"
            assert row["time_ms"] is not None
            assert row["time_ms"]["median"] > 0
    assert op["targets"] == []


@pytest.mark.slow
def test_a_bench_on_a_cpu_checks_ours_times_torch_and_resumes(tmp_path: Path) -> None:
    record = kernel_bench.bench_kernels(["rmsnorm"], tmp_path, quick=True, device="cpu")
    assert record == read_kernels(tmp_path)
    assert record["interpreted"]
    (op,) = record["ops"]
    assert op["status"] == "ok", op["reason"]
    rows = {(row["size"], row["contender"], row["step"]): row for row in op["rows"]}
    assert len(rows) == 4 * 5 * 2  # sizes alone and with the residual add, contenders, passes
    for (size, contender, step), found in rows.items():
        if contender == "Liger":
            continue
        assert found["correctness"] is not None, (size, contender, step, found["reason"])
        assert found["correctness"]["verdict"] == "equal", found["correctness"]["why"]
        assert (found["time_ms"] is not None) == (contender != "rush")
    assert rows["64 × 128", "rush", "both"]["reason"] == INTERPRETED
    assert op["targets"] == []

    said: list[str] = []
    again = kernel_bench.bench_kernels(
        ["rmsnorm"], tmp_path, quick=True, device="cpu", watch=lambda p: said.append(p.doing)
    )
    assert again["ops"] == record["ops"]
    assert again["started"] == record["started"]
    assert said == ["the machine and its ceilings", "done"]


def test_an_op_that_kills_its_process_hangs_or_raises_is_noted_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_bench, "PROCESS", "tests.lab.planted.crashing_bench")
    monkeypatch.setattr(kernel_bench, "LIMIT_S", 3.0)
    progress: list[tuple[str, int]] = []
    record = kernel_bench.bench_kernels(
        ["rmsnorm", "gelu", "layernorm", "rope", "swiglu", "adamw"],
        tmp_path,
        watch=lambda op, doing, done, total: progress.append((op, done)),
    )
    status = {op["op"]: op["status"] for op in record["ops"]}
    assert status == {"rmsnorm": "ok", "gelu": "crashed", "layernorm": "ok", "rope": "timed_out",
                      "swiglu": "failed", "adamw": "ok"}  # fmt: skip
    reasons = {op["op"]: op["reason"] for op in record["ops"]}
    assert "SIGSEGV" in str(reasons["gelu"])
    assert "no output for 3 s" in str(reasons["rope"])
    assert "the device is lost" in str(reasons["swiglu"])
    assert progress[-1] == ("adamw", 6)


# The clock.

SLEEP_S = 0.001


def prompt_and_late(work: Callable[[], object]) -> dict[str, TimedCase]:
    """The same work, launched at once and by a host that sleeps first."""

    def launched_late(_: object) -> None:
        time.sleep(SLEEP_S)
        work()

    return {
        "prompt": TimedCase(lambda: None, lambda _: work()),
        "late": TimedCase(lambda: None, launched_late),
    }


def sleep_counted(best: Mapping[str, float]) -> float:
    """The part of the host's sleep that the clock took for work, by the least disturbed samples of either case."""
    return (best["late"] - best["prompt"]) / (1000 * SLEEP_S)


def test_a_clock_of_the_host_is_seen_to_count_its_sleep() -> None:
    small = torch.ones(16)
    found = take_turns(prompt_and_late(lambda: small.add_(1)), CPU, Effort(least=10, most=10, budget_s=0.0))
    assert sleep_counted({name: min(samples) for name, samples in found.items()}) > 0.5, found


# On a GPU.


@pytest.mark.gpu
def test_the_clock_counts_device_time_and_not_the_host() -> None:
    """By the best of many samples: other processes on device and host lengthen a sample, or keep the host from being ahead,
    and no sample of a clock that counts the sleep is shorter than it. Every round finds anew how far ahead the host must be.
    """
    device = torch.device("cuda")
    source = torch.ones(2**28, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    small = torch.ones(1024, device=device)
    copy = TimedCase(lambda: None, lambda _: target.copy_(source))
    cases = {"copy": copy, **prompt_and_late(lambda: small.add_(1))}
    best, known = dict.fromkeys(cases, math.inf), 0.0
    for _ in range(15):
        found = take_turns(cases, device, Effort(least=10, most=10, budget_s=0.0))
        best = {name: min(best[name], *samples) for name, samples in found.items()}
        known = max(known, bandwidth("cuda", budget_s=0.3)["copy"].rate)
        share = 2 * 2**28 / (best["copy"] / 1000) / known
        if 0.6 < share < 1.25 and sleep_counted(best) < 0.3 and best["late"] < 500 * SLEEP_S:
            break
    assert 0.6 < share < 1.25, (share, known)
    assert best["late"] < 500 * SLEEP_S, f"half a millisecond at best, behind a host that sleeps one: {best}"
    assert sleep_counted(best) < 0.3, f"a host that sleeps a millisecond was timed: {best}"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_bench_on_a_gpu_measures_time_and_memory_of_our_kernel(tmp_path: Path) -> None:
    record = kernel_bench.bench_kernels(["swiglu"], tmp_path, quick=True)
    (op,) = record["ops"]
    assert op["status"] == "ok", op["reason"]
    failed = [
        (row["contender"], row["reason"]) for row in op["rows"] if row["status"] not in ("ok", "absent")
    ]
    assert failed == []
    ours = [row for row in op["rows"] if row["contender"] == "rush"]
    assert len(ours) == 4
    for row in ours:
        assert verdict(row) == "equal", row["correctness"]
        assert row["ceiling_fraction"] is not None
        assert 0.1 < row["ceiling_fraction"] < 1.4, (row["size"], row["step"], row["ceiling_fraction"])
        assert row["peak_extra_bytes"] is not None
        # The result and two gradients, each as large as an input.
        least = 3 * row["dims"]["rows"] * row["dims"]["columns"] * 2
        assert least <= row["peak_extra_bytes"] < 1.5 * least
    assert {target["verdict"] for target in op["targets"]} <= {"reached", "missed", "not measured"}
