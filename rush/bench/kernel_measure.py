"""One op on this device: every contender checked and timed at every size, and its memory measured.

For each size the exact result is computed once. Every contender is then called on its own copy of the inputs:
the first call compiles, the second is checked against the exact result and its peak memory is measured, and
the remaining contenders are timed in turns. A contender that fails (not installed, refused, out of memory, an
exception) is a row with a reason; the others continue.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from rush.bench import kernel_check as check
from rush.errors import RushError
from rush.hardware.stopwatch import CaseFailed, Effort, TimedCase, take_turns
from rush.kernels.study import Call, Contender, Inputs, Pass, Size, Study
from rush.lab.statistics import median_interval
from rush.records.kernels import KernelRow
from rush.records.typed import Measured

INTERPRETED = "interpreted: not a speed"
Ceilings = dict[str, Any]
Report = Callable[[str], None]


class DeviceLost(Exception):
    """The device is unusable in this process (an illegal access, for example): no later result is valid."""


@dataclass
class ContenderEntry:
    """A contender at one size."""

    contender: Contender
    status: str = "ok"
    reason: str | None = None
    call: Call | None = None
    inputs: Inputs = field(default_factory=dict)
    correctness: dict[str, Any] | None = None
    peak_extra_bytes: int | None = None
    beyond_results_bytes: int | None = None
    first_call_s: float | None = None
    times: dict[Pass, list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class BenchDevice:
    """Where and how an op is measured."""

    device: torch.device
    ceilings: Ceilings | None
    effort: Effort
    quick: bool = False
    cpp: bool = False
    """Whether kernels in C++ can run here."""

    def interpreted(self, study: Study) -> bool:
        """Whether our kernel is, and so has no speed."""
        return self.device.type != "cuda" and not (self.cpp and study.on_cpu)

    def sizes(self, study: Study) -> tuple[Size, ...]:
        if self.device.type != "cuda":
            return study.small if self.interpreted(study) else study.on_cpu
        return tuple(size for size in study.sizes if size.target) if self.quick else study.sizes

    def dtype(self, study: Study) -> torch.dtype:
        # A CPU multiplies sixteen bits slowly, if at all.
        return study.dtype if self.device.type == "cuda" else torch.float32


def measure_size(study: Study, size: Size, place: BenchDevice, report: Report) -> list[KernelRow]:
    """The rows of one size, all contenders and passes."""
    dtype = place.dtype(study)
    torch.compiler.reset()  # every size is compiled for itself, and none counts against the limit of recompiles
    inputs = study.make(size, place.device, dtype)
    report(f"{size.label}: the exact result")
    expected, grad_outputs = _exact_results(study, inputs, dtype)
    entries = []
    for contender in study.contenders:
        report(f"{size.label}: {contender.name}")
        entries.append(_try(contender, inputs, expected, grad_outputs, place, place.interpreted(study)))
    expected = None  # the exact results are the largest thing here
    for step in study.passes:
        report(f"{size.label}: timing {step}")
        _time(step, entries, grad_outputs, place)
    rows = [_row(study, size, step, entry, place) for entry in entries for step in study.passes]
    entries.clear()
    _free(place.device)
    return rows


def _exact_results(
    study: Study, inputs: Inputs, dtype: torch.dtype
) -> tuple[check.ExactResults | None, list[Tensor] | None]:
    plain = next(contender for contender in study.contenders if contender.kind == "plain")
    try:
        exact = study.exact if dtype.itemsize < 4 else torch.float64
        return check.exact_results(study.reference, plain.call, inputs, exact, dtype)
    except torch.OutOfMemoryError:
        return None, None


def _try(
    contender: Contender,
    inputs: Inputs,
    expected: check.ExactResults | None,
    grad_outputs: Sequence[Tensor] | None,
    place: BenchDevice,
    interpreted: bool,
) -> ContenderEntry:
    """Set a contender up and check it; whatever goes wrong becomes its status."""
    entry = ContenderEntry(contender)
    if (why := contender.absent(place.device)) is not None:
        entry.status, entry.reason = "absent", why
        return entry
    try:
        entry.inputs = check.fresh(inputs)
        entry.call = _compiled(contender.call) if contender.compile else contender.call
        _check(entry, expected, grad_outputs, place)
        if contender.kind == "ours" and interpreted:
            entry.status, entry.reason = "untimed", INTERPRETED
    except Exception as problem:
        _note_failure(entry, problem, place)
    return entry


def _compiled(call: Call) -> Call:
    compiled: Call = torch.compile(call, dynamic=False, fullgraph=True)
    return compiled


def _note_failure(entry: ContenderEntry, problem: Exception, place: BenchDevice) -> None:
    """Note what went wrong, unless it took the device with it."""
    entry.status, entry.reason = _status_of(problem), one_line(problem)
    entry.inputs, entry.call = {}, None
    problem.__traceback__ = None  # it holds the tensors
    try:
        _free(place.device)
    except RuntimeError as error:
        raise DeviceLost(f"{entry.contender.name}: {one_line(problem)}") from error


def _status_of(problem: Exception) -> str:
    if isinstance(problem, torch.OutOfMemoryError):
        return "out_of_memory"
    return "refused" if isinstance(problem, RushError) else "failed"


def one_line(problem: Exception) -> str:
    """What went wrong, in one line."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"{type(problem).__name__}: {lines[0][:300]}" if lines else type(problem).__name__


def _check(
    entry: ContenderEntry,
    expected: check.ExactResults | None,
    grad_outputs: Sequence[Tensor] | None,
    place: BenchDevice,
) -> None:
    """The first call, which compiles; then the memory and the results of another one."""
    assert entry.call is not None
    # Some contenders write into their inputs or into the output gradients: each call gets its own.
    mine, own = check.fresh(entry.inputs), None if grad_outputs is None else check.copies(grad_outputs)
    began = time.perf_counter()
    found = check.results_of(entry.call, mine, own)
    _wait(place.device)
    entry.first_call_s = time.perf_counter() - began
    if place.device.type == "cuda":
        # Memory that is freed meanwhile would count, and autograd's own thread may release the last call late: the larger
        # of two.
        for _ in range(2):
            del found
            mine, own = (
                check.fresh(entry.inputs),
                None if grad_outputs is None else check.copies(grad_outputs),
            )
            gc.collect()
            _wait(place.device)
            torch.cuda.reset_peak_memory_stats(place.device)
            before = torch.cuda.memory_allocated(place.device)
            found = check.results_of(entry.call, mine, own)
            _wait(place.device)
            peak = torch.cuda.max_memory_allocated(place.device) - before
            entry.peak_extra_bytes = max(peak, entry.peak_extra_bytes or 0)
        new = _new_bytes(found.values(), [*mine.values(), *(own or [])])
        entry.beyond_results_bytes = max(0, (entry.peak_extra_bytes or 0) - new)
    entry.correctness = check.judge(entry.contender, found, expected)


def _new_bytes(found: Iterable[Tensor], given: Iterable[Tensor]) -> int:
    """Bytes of the results that are not memory of what was given, each piece of memory counted once."""
    old = {tensor.untyped_storage().data_ptr() for tensor in given}
    new = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in found}
    return sum(size for pointer, size in new.items() if pointer not in old)


def _time(
    step: Pass, entries: Sequence[ContenderEntry], grad_outputs: Sequence[Tensor] | None, place: BenchDevice
) -> None:
    """Let the contenders take turns; one that fails is removed and the others start over."""
    running = {entry.contender.name: entry for entry in entries if entry.status == "ok"}
    while running:
        cases = {name: _case(step, entry, grad_outputs) for name, entry in running.items()}
        try:
            found = take_turns(cases, place.device, place.effort)
        except CaseFailed as failed:
            del cases
            _note_failure(running.pop(failed.name), failed.problem, place)
            continue
        for name, samples in found.items():
            running[name].times[step] = samples
        return


def _case(step: Pass, entry: ContenderEntry, grad_outputs: Sequence[Tensor] | None) -> TimedCase:
    assert entry.call is not None
    call, inputs = entry.call, entry.inputs
    own = None if grad_outputs is None else check.copies(grad_outputs)

    def forward() -> tuple[Tensor, ...]:
        return check.outputs_of(call, inputs)

    def backward(outputs: tuple[Tensor, ...]) -> object:
        grads = check.random_grad_outputs(check.differentiable(outputs)) if own is None else own
        return check.backward_of(outputs, inputs, grads)

    if step == "forward":
        return TimedCase(lambda: None, lambda _: forward())
    if step == "backward":
        return TimedCase(forward, backward)
    return TimedCase(lambda: None, lambda _: backward(forward()))


def _row(study: Study, size: Size, step: Pass, entry: ContenderEntry, place: BenchDevice) -> KernelRow:
    samples = entry.times.get(step)
    row: KernelRow = {
        "size": size.label,
        "dims": dict(size.dims),
        "series": study.series(size),
        "contender": entry.contender.name,
        "kind": entry.contender.kind,
        "step": step,
        "status": entry.status,
        "reason": entry.reason,
        "time_ms": _time_of(samples) if samples else None,
        "peak_extra_bytes": entry.peak_extra_bytes,
        "beyond_results_bytes": entry.beyond_results_bytes,
        "correctness": entry.correctness,
        "first_call_s": entry.first_call_s,
    }
    return cast(KernelRow, {**row, **_rates(study, size, step, row["time_ms"], place)})


def _time_of(samples: list[float]) -> Measured:
    middle = median_interval([samples])
    return {"median": middle.median, "ci95": [middle.low, middle.high], "n": middle.n, "samples": samples}


def _rates(
    study: Study, size: Size, step: Pass, time_ms: Measured | None, place: BenchDevice
) -> dict[str, Any]:
    """What was moved and computed, over the time; and over the ceiling that bounds this op."""
    dtype = place.dtype(study)
    work = study.work(size, dtype.itemsize, step)
    row: dict[str, Any] = {"bytes": work.bytes, "flops": work.flops, "bytes_per_s": None, "flops_per_s": None,
                "ceiling_fraction": None}  # fmt: skip
    if time_ms is None:
        return row
    seconds = time_ms["median"] / 1000
    row["bytes_per_s"], row["flops_per_s"] = work.bytes / seconds, work.flops / seconds or None
    ceilings = place.ceilings or {}
    if study.bound == "memory":
        ceiling, reached = ceilings.get("copy_bytes_per_s"), row["bytes_per_s"]
    else:
        name = study.matmul_dtype if place.device.type == "cuda" else None
        ceiling = (ceilings.get("matmul") or {}).get(name or str(dtype).removeprefix("torch."))
        reached = row["flops_per_s"]
    row["ceiling_fraction"] = reached / ceiling if ceiling and reached else None
    return row


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
