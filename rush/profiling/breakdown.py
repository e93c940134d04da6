"""What a step's time went to, from a profile: attention, matmul, elementwise work, loss, optimizer, data, idle.

A piece of time (a kernel on a GPU, an operator's own time on a CPU) is told by its name and the names of
what called it. Fused kernels of a compiled graph carry the names of what was fused into them; on a CPU
they carry none, and count as elementwise. On a GPU "idle" is time in which the device had no work.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler_util import FunctionEvent

CLASSES = ("attention", "matmul", "norm_elementwise", "loss", "optimizer", "data", "other", "idle")

LONGEST, NAME = 16, 120
"""How many of the longest kernels are kept, and how much of a name: templates make some very long."""

# In this order: the update's elementwise work is the optimizer's, a softmax over the vocabulary the loss's.
_RULES = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        (
            "optimizer",
            r"Optimizer\.(step|zero_grad)|[Aa]dam|multi_tensor_apply|lpnorm|_foreach_norm|vector_norm|rush::grad_norm",
        ),
        ("loss", r"[Ll]og_?[Ss]oft[Mm]ax|[Nn]ll_?[Ll]oss|cross_entropy|CrossEntropy"),
        (
            "attention",
            r"scaled_dot_product|flash_|fmha|sdpa|flex_attention|aten::(bmm|baddbmm)|Bmm|(?<!prepare_)[Ss]oft[Mm]ax|"
            r"masked_fill|MaskedFill",
        ),
        ("data", r"Memcpy HtoD"),
        (
            "matmul",
            r"aten::(mm|addmm_?|linear|matmul|_scaled_mm|_int_mm)\b|MmBackward|gemm|nvjet|cutlass|xmma|splitK|"
            r"triton_tem\w*mm|fp16_matmul",
        ),
        ("other", r"embedding|Embedding|Memcpy|Memset"),
    )
)
_ELEMENTWISE = re.compile(r"aten::|triton_|CompiledFxGraph|CompiledFunction|kernel|void ")


def classify(names: Sequence[str]) -> str:
    """The class of a piece of time, from its callers' names and its own, outermost first."""
    chain = " > ".join(names)
    for kind, pattern in _RULES:
        if pattern.search(chain):
            return kind
    return "norm_elementwise" if _ELEMENTWISE.search(chain) else "other"


@dataclass(frozen=True)
class Piece:
    """Time that one kernel (on a CPU one operator) took, all its calls together."""

    name: str
    kind: str
    ms: float
    calls: int


def pieces(events: Iterable[FunctionEvent], *, on_gpu: bool) -> list[Piece]:
    """What the time of a profile went to, the longest first; one name may be of several kinds, by who called it."""
    found: dict[tuple[str, str], Piece] = {}
    for piece in (_device_times if on_gpu else _host_times)(list(events)):
        sofar = found.get((piece.name, piece.kind), Piece(piece.name, piece.kind, 0.0, 0))
        both = replace(sofar, ms=sofar.ms + piece.ms, calls=sofar.calls + piece.calls)
        found[piece.name, piece.kind] = both
    return sorted(found.values(), key=lambda piece: -piece.ms)


def breakdown(found: Iterable[Piece], *, wall_ms: float, data_ms: float, steps: int) -> dict[str, float]:
    """Milliseconds of a step by class. `data_ms` is the wait for batches that was measured beside the profile."""
    spent = dict.fromkeys(CLASSES, 0.0)
    for piece in found:
        spent[piece.kind] += piece.ms
    # Waiting for data is time in which nothing ran; where work went on meanwhile, it cost nothing.
    nothing_ran = max(0.0, wall_ms - sum(spent.values()))
    waited = min(data_ms, nothing_ran)
    spent["data"] += waited
    spent["idle"] = nothing_ran - waited
    return {kind: spent[kind] / steps for kind in CLASSES}


def longest(found: Iterable[Piece], *, steps: int) -> list[dict[str, Any]]:
    """The longest pieces of a step, as plain JSON values."""
    return [
        {"name": piece.name[:NAME], "kind": piece.kind, "ms": piece.ms / steps, "calls": piece.calls / steps}
        for piece in islice(found, LONGEST)
    ]


def callers(event: FunctionEvent) -> list[str]:
    """The names of what called this, and its own, outermost first."""
    names = [event.name]
    while event.cpu_parent is not None:
        event = event.cpu_parent
        names.append(event.name)
    return names[::-1]


def _host_times(events: list[FunctionEvent]) -> Iterable[Piece]:
    for event in events:
        if event.device_type == DeviceType.CPU and event.self_cpu_time_total > 0:
            yield Piece(event.name, classify(callers(event)), event.self_cpu_time_total / 1000, 1)


def _device_times(events: list[FunctionEvent]) -> Iterable[Piece]:
    ran = Counter(
        (event.name, event.time_range.elapsed_us())  # type: ignore[no-untyped-call]
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    )
    owners = [event for event in events if event.device_type == DeviceType.CPU and event.kernels]
    # The profiler hands a kernel to every event that bears its launcher's number, and calls and waits of the driver are
    # numbered apart from operators: one may bear the number by accident. A kernel counts once, the operator's first.
    for event in sorted(owners, key=lambda event: "::" not in event.name):
        above = callers(event)
        for kernel in event.kernels:
            if ran[kernel.name, kernel.duration] > 0:
                ran[kernel.name, kernel.duration] -= 1
                yield Piece(kernel.name, classify([*above, kernel.name]), kernel.duration / 1000, 1)
    # Kernels replayed from a recording have no caller in the profile: their own names must do.
    for (name, microseconds), calls in ran.items():
        if calls:
            yield Piece(name, classify([name]), calls * microseconds / 1000, calls)
