"""Exposed communication: collectives that no computation overlaps, from a profile.

On a GPU communication is NCCL's kernels, on the CPU gloo's operations in their own thread; computation is every other kernel,
or an operator in a thread that is not gloo's. Communication is exposed while it runs and nothing is computed. A rank waits for
a slower one inside a collective, so uneven work counts as well. The profiler slows small operators down, which hides more than
usual.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler_util import FunctionEvent

from rush.training.build import FORWARD

GLOO, NCCL = "gloo:", "nccl"
_WAITS = "_c10d_functional::wait_tensor"
_COMPUTES = ("aten::", "triton_", "CompiledFxGraph", "CompiledFunction")
Span = tuple[float, float]

HOW = {
    "cuda": "from the profile of a step: time in which a kernel of NCCL ran on the rank's GPU and no other kernel did",
    "cpu": "from the profile of a step: time in which an operation of gloo was under way and no operator of the rank's own "
    "threads was",
}


@dataclass(frozen=True)
class CommTime:
    """Milliseconds of a step in which this rank communicated, and in which it did nothing else."""

    total_ms: float
    exposed_ms: float


def comm_time(events: Iterable[FunctionEvent], *, steps: int, on_gpu: bool) -> CommTime:
    events = list(events)
    sent, computed = _on_gpu(events) if on_gpu else _on_cpu(events)
    total, hidden = merged(sent), merged(computed)
    return CommTime(_length(total) / 1000 / steps, _length(subtract(total, hidden)) / 1000 / steps)


def _on_gpu(events: Sequence[FunctionEvent]) -> tuple[list[Span], list[Span]]:
    kernels = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    sent = [_span(event) for event in kernels if event.name.startswith(NCCL)]
    return sent, [_span(event) for event in kernels if not event.name.startswith(NCCL)]


def _on_cpu(events: Sequence[FunctionEvent]) -> tuple[list[Span], list[Span]]:
    host = [event for event in events if event.device_type == DeviceType.CPU]
    sent = [_span(event) for event in host if event.name.startswith(GLOO)]
    # gloo's threads copy with the same operators; the rank's own thread is where its passes are.
    threads = {event.thread for event in host if event.name == FORWARD}
    own = [event for event in host if event.thread in threads]
    # An operator on a DTensor may contain the collective that it waits for.
    waits = merged(_span(event) for event in own if event.name == _WAITS)
    return sent, subtract(merged(_span(event) for event in own if _computes(event.name)), waits)


def _computes(name: str) -> bool:
    return any(mark in name for mark in _COMPUTES)


def _span(event: FunctionEvent) -> Span:
    return event.time_range.start, event.time_range.end


def merged(spans: Iterable[Span]) -> list[Span]:
    """The union of the spans, as disjoint spans in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > start:
            found.append((start, end))
    return found


def subtract(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """`spans` minus `others`; both disjoint and in order."""
    left: list[Span] = []
    for start, end in spans:
        at = max(0, bisect_left(others, (start, start)) - 1)
        begun = start
        while at < len(others) and others[at][0] < end:
            if others[at][0] > begun:
                left.append((begun, others[at][0]))
            begun = max(begun, others[at][1])
            at += 1
        if begun < end:
            left.append((begun, end))
    return left


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
