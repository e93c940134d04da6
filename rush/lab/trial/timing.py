"""Timing steps: warm up until the step time is steady, then timed windows of whole optimizer steps.

The first step includes compiling, loading kernels and growing the allocator; it is reported separately and
never part of a throughput. After it, step time is steady when the median of the last few steps is close to
that of the few before. A sample is one optimizer step, or as many as fill a short window if steps are too
short for the clock and the scheduler. Samples follow each other without a pause, as steps do in training: if
the device's queue ran empty before each sample, it would wait for the host's first launches every time. The
wait for data is part of a step, as in training; it is also reported separately.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import psutil  # type: ignore[import-untyped]
import torch

from rush.data import Batch, Steps
from rush.hardware import conditions, peak_memory_bytes, reset_peak_memory
from rush.hardware.memory_use import process_memory
from rush.lab.paired import Timed
from rush.lab.trial.found import TimingFound
from rush.lab.trial.step_log import StepLog
from rush.models import Decoder
from rush.training.build import Run
from rush.training.schedule import learning_rate
from rush.training.step import LaunchedStep, launch_step

STEADY_STEPS = 3
STEADY_WITHIN = 0.05
ENOUGH = 8
"""Samples that do where each takes long."""
COMMON = 8
"""With uneven batches, timing starts after a multiple of this many steps."""
KINDS = ("processed", "real", "trained")
"""Kinds of tokens: processed, without padding, trained (with a label)."""


@dataclass(frozen=True)
class Timing:
    """How to time: the ladder's `[measure]` table."""

    windows: int = 12
    """Samples; 0: the first step is the only one, and counts with all that it pays for. For steps that take minutes."""
    window_ms: float = 50.0
    warmup_max_steps: int = 40
    warmup_max_s: float = 60.0
    timed_max_s: float = 30.0
    slowest: float = 0.0
    """Tokens per second, of the kind that counts: a run that is slower when it is warm is not timed any longer."""


class Stepper:
    """Launches the run's next step each time it is asked, and keeps the time it waited for data.

    As in training, the host looks at a step's numbers when the next step is under way.
    """

    def __init__(self, run: Run, loader: Steps) -> None:
        self.run = run
        self.loader = loader
        self.step = 0
        self.waited_s = 0.0
        self.last: LaunchedStep | None = None
        self.log = StepLog()
        self.counts: list[dict[str, float]] = []
        """Tokens of every kind in each step looked at so far, of all ranks."""

    def batches(self) -> list[Batch]:
        """The micro batches of the next step."""
        began = time.perf_counter()
        batches = list(self.loader.next_step())
        self.waited_s += time.perf_counter() - began
        return batches

    def __call__(self) -> None:
        self.step += 1
        schedule_step = min(self.step, self.run.recipe.steps)
        lr = learning_rate(self.run.recipe, schedule_step)
        batches = self.batches()
        self.log.given(batches)
        before, self.last = self.last, launch_step(self.run, self.step, lr, batches)
        self.log.launched()
        self._look_at(before)

    def settle(self) -> None:
        """Look at the last step, too: it is over."""
        self._look_at(self.last)
        self.last = None

    def _look_at(self, launched: LaunchedStep | None) -> None:
        if launched is not None:
            result = launched.result()  # raises if it diverged
            self.log.result(result)
            counts = result.counts
            self.counts.append({"processed": counts.tokens, "real": counts.real, "trained": counts.labels})


def time_steps(
    run: Run,
    loader: Steps,
    timing: Timing,
    agree: Callable[[float], float] = lambda seconds: seconds,
    stepper: Stepper | None = None,
) -> TimingFound:
    """Warm up, then time; everything as plain JSON values.

    Of several ranks all must make the same number of steps: `agree` makes of each one's seconds those that count for all.
    `stepper`: what launches the steps and logs them, where more steps follow the timed ones.
    """
    stepper, clock = stepper or Stepper(run, loader), _clock(run.device)
    # What counts is tokens in pretraining, and in fine-tuning those that are learned from.
    counted = "processed" if run.recipe.objective.kind == "lm" else "trained"

    def one() -> float:
        return agree(clock(stepper, 1, 1)[0])

    first_s = one()
    cold = timing.windows == 0
    if cold:
        stepper.settle()
    warm, steady = ([first_s], False) if cold else _warm_up(one, timing)
    if len(warm) == 1 and _too_slow(stepper, warm, counted, timing):
        warm.append(one())  # one step alone may have paid for something else
    hopeless = _too_slow(stepper, warm, counted, timing)
    stepper.settle()
    if not (hopeless or cold) and len({count[counted] for count in stepper.counts}) > 1:
        # Where batches differ, recipes are timed on the same ones only if all start at a common step.
        while stepper.step % COMMON:
            warm.append(one())
    step_s = statistics.median(warm[-STEADY_STEPS:])
    per_window = max(1, math.ceil(timing.window_ms / 1000 / step_s))
    windows = max(
        min(timing.windows, ENOUGH), min(timing.windows, int(timing.timed_max_s / (per_window * step_s)))
    )
    stepper.settle()
    if hopeless or cold:
        per_window, waited_before, steps_before = 1, 0.0, 0
        samples, tokens, around = warm, stepper.counts[-len(warm) :], conditions(run.machine)
        began = [1] if cold else list(range(2, len(warm) + 2))
    else:
        reset_peak_memory(run.device.type)
        waited_before, steps_before = stepper.waited_s, stepper.step
        samples, tokens, began = _timed(stepper, clock, windows // 2, per_window)
        around = conditions(run.machine)  # in the middle of the work
        more_samples, more_tokens, then = _timed(stepper, clock, windows - windows // 2, per_window)
        samples, tokens = [agree(seconds) for seconds in samples + more_samples], tokens + more_tokens
        began += then
    return {
        "samples_s": samples,
        "steps_per_sample": per_window,
        "counted": counted,
        "sample_tokens": {kind: [each[kind] for each in tokens] for kind in KINDS},
        "sample_steps": began,
        "step_tokens": tokens[-1]["processed"],
        "step_labels": tokens[-1]["trained"],
        "compile_s": max(0.0, first_s - step_s),
        "warmup_s": sum(warm),
        "warmup_steps": 0 if cold else len(warm) + 1,
        "cold": cold,
        "steady": steady,
        "hopeless": hopeless,
        "data_wait_ms": 1000 * (stepper.waited_s - waited_before) / (stepper.step - steps_before),
        **_memory(run.device.type),
        "flops_per_token": _work(run),
        "dtype": run.matmul_dtype(),
        "rate_dtype": run.rate_dtype(),
        "environment": around.to_dict(),
        "steps": stepper.log.to_dict(),
        "packed": run.loader_options.get("packing") is not None,
    }


def rates(timing: TimingFound, kind: str | None = None) -> list[float]:
    """Tokens per second of each sample, of one kind, or of the kind that counts; steps may hold unequal numbers."""
    counted = kind or timing.get("counted", "processed")
    if "sample_tokens" not in timing:  # written before steps could differ
        each = timing["step_labels"] if counted == "trained" else timing["step_tokens"]
        return [each / seconds for seconds in timing["samples_s"]]
    tokens = timing["sample_tokens"][counted]
    return [count / seconds for count, seconds in zip(tokens, timing["samples_s"], strict=True)]


def timed(timing: TimingFound) -> Timed:
    """The samples of a timing with the batches they were taken on, as far as it says."""
    told = timing.get("sample_tokens") or {}
    tokens = told.get(timing.get("counted", "processed"), ())
    return Timed(rates(timing), tokens, timing.get("sample_steps"), timing.get("steps_per_sample", 1))


def _memory(device: str) -> TimingFound:
    """The peak of the timed steps; on a CPU with that of the processes it started, which are no other machine. On a GPU what lies in
    host memory is counted apart."""
    peak, children = peak_memory_bytes(device), children_bytes()
    if device == "cpu":
        return {"peak_memory_bytes": peak + children, "elsewhere_bytes": children}
    return {"peak_memory_bytes": peak, "elsewhere_bytes": children + process_memory().resident_bytes}


def children_bytes() -> int:
    """Memory that belongs to the processes this one started alone; without the compiler's, which wait for work."""
    total = 0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if not any("compile_worker" in word for word in child.cmdline()):
                total += child.memory_full_info().uss
    return total


def _work(run: Run) -> int | None:
    """Unknown for a model that is not ours, a baseline's."""
    return run.flops_per_token() if isinstance(run.model, Decoder) else None


def _too_slow(stepper: Stepper, warm: list[float], counted: str, timing: Timing) -> bool:
    """Whether even the fastest step was too slow to continue."""
    tokens = statistics.mean(step[counted] for step in stepper.counts)
    return tokens / min(warm) < timing.slowest


def _timed(
    stepper: Stepper, clock: Clock, windows: int, per_window: int
) -> tuple[list[float], list[dict[str, float]], list[int]]:
    """Seconds and tokens of a step, of each window, and the number of the step it began with."""
    if stepper.run.device.type == "cuda":
        stepper()  # keep the device busy while the host prepares the timed steps
    first = stepper.step + 1
    samples = [seconds / per_window for seconds in clock(stepper, windows, per_window)]
    stepper.settle()
    counted = stepper.counts[len(stepper.counts) - windows * per_window :]
    places = range(0, len(counted), per_window)
    steps = [counted[place : place + per_window] for place in places]
    tokens = [{kind: sum(step[kind] for step in some) / per_window for kind in KINDS} for some in steps]
    return samples, tokens, [first + place for place in places]


def _warm_up(one: Callable[[], float], timing: Timing) -> tuple[list[float], bool]:
    """Times of the steps it took, `one` after the other, and whether they became steady before the cap."""
    times: list[float] = []
    while len(times) < timing.warmup_max_steps and sum(times) < timing.warmup_max_s:
        times.append(one())
        if len(times) >= 2 * STEADY_STEPS:
            last = statistics.median(times[-STEADY_STEPS:])
            before = statistics.median(times[-2 * STEADY_STEPS : -STEADY_STEPS])
            if abs(last / before - 1) <= STEADY_WITHIN:
                return times, True
    return times, False


Clock = Callable[[Callable[[], None], int, int], list[float]]
"""(call, number of windows, calls per window) -> the seconds of each window."""


def _clock(device: torch.device) -> Clock:
    """By device events if available, else by the host's clock."""
    return _by_device if device.type == "cuda" else _by_host


def _by_host(call: Callable[[], None], windows: int, per_window: int) -> list[float]:
    marks = [time.perf_counter()]
    for _ in range(windows):
        for _ in range(per_window):
            call()
        marks.append(time.perf_counter())
    return [end - start for start, end in pairwise(marks)]


def _by_device(call: Callable[[], None], windows: int, per_window: int) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(windows + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        for _ in range(per_window):
            call()
        mark.record()
    marks[-1].synchronize()
    return [float(start.elapsed_time(end)) / 1000 for start, end in pairwise(marks)]
