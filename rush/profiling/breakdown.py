"""The breakdown of a step's time, from a profile: attention, matmul, elementwise, loss, optimizer, data, idle.

A kernel on a GPU, or an operator's self time on a CPU, is classified by its name and its callers' names. Fused kernels of a
compiled graph carry the names of what was fused; on a CPU they carry none, and count as elementwise. "idle" is time in which
a GPU had no work.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler_util import FunctionEvent

CLASSES = ("attention", "matmul", "norm_elementwise", "loss", "optimizer", "data", "other", "idle")

LONGEST, NAME = 16, 120
"""The number of longest kernels that are kept, and the characters of their names."""

# In this order: elementwise work of the update is the optimizer's, a softmax over the vocabulary the loss's.
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
    """The class of a kernel, from its callers' names and its own, outermost first."""
    return _class_of(" > ".join(names))


@lru_cache(maxsize=4096)  # a step has thousands of operators, and few kinds of them
def _class_of(chain: str) -> str:
    for kind, pattern in _RULES:
        if pattern.search(chain):
            return kind
    return "norm_elementwise" if _ELEMENTWISE.search(chain) else "other"


@dataclass(frozen=True)
class KernelTime:
    """The time of one kernel (on a CPU one operator), over all its calls."""

    name: str
    kind: str
    ms: float
    calls: int


def kernel_times(events: Iterable[FunctionEvent], *, on_gpu: bool) -> list[KernelTime]:
    """Kernel times of a profile, the longest first; one name may have several kinds, by its callers."""
    found: dict[tuple[str, str], KernelTime] = {}
    for piece in (_device_times if on_gpu else _host_times)(list(events)):
        sofar = found.get((piece.name, piece.kind), KernelTime(piece.name, piece.kind, 0.0, 0))
        both = replace(sofar, ms=sofar.ms + piece.ms, calls=sofar.calls + piece.calls)
        found[piece.name, piece.kind] = both
    return sorted(found.values(), key=lambda piece: -piece.ms)


def breakdown(found: Iterable[KernelTime], *, wall_ms: float, data_ms: float, steps: int) -> dict[str, float]:
    """Milliseconds of a step by class. `data_ms` is the measured wait for batches."""
    spent = dict.fromkeys(CLASSES, 0.0)
    for piece in found:
        spent[piece.kind] += piece.ms
    # Waiting for data only counts while nothing ran.
    nothing_ran = max(0.0, wall_ms - sum(spent.values()))
    waited = min(data_ms, nothing_ran)
    spent["data"] += waited
    spent["idle"] = nothing_ran - waited
    return {kind: spent[kind] / steps for kind in CLASSES}


def longest(found: Iterable[KernelTime], *, steps: int) -> list[dict[str, Any]]:
    """The longest kernels of a step, as JSON values."""
    return [
        {"name": piece.name[:NAME], "kind": piece.kind, "ms": piece.ms / steps, "calls": piece.calls / steps}
        for piece in islice(found, LONGEST)
    ]


def callers(event: FunctionEvent) -> list[str]:
    """The callers' names and its own, outermost first."""
    names = [event.name]
    while event.cpu_parent is not None:
        event = event.cpu_parent
        names.append(event.name)
    return names[::-1]


def _host_times(events: list[FunctionEvent]) -> Iterable[KernelTime]:
    for event in events:
        if event.device_type == DeviceType.CPU and (own_us := event.self_cpu_time_total) > 0:
            yield KernelTime(event.name, classify(callers(event)), own_us / 1000, 1)


def _device_times(events: list[FunctionEvent]) -> Iterable[KernelTime]:
    ran = Counter(
        (event.name, event.time_range.elapsed_us())  # type: ignore[no-untyped-call]
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    )
    owners = [event for event in events if event.device_type == DeviceType.CPU and event.kernels]
    # The profiler gives a kernel to every event with its correlation id, and driver calls are numbered apart from operators:
    # they may coincide. A kernel counts once, for the operator first.
    for event in sorted(owners, key=lambda event: "::" not in event.name):
        above = callers(event)
        for kernel in event.kernels:
            if ran[kernel.name, kernel.duration] > 0:
                ran[kernel.name, kernel.duration] -= 1
                yield KernelTime(kernel.name, classify([*above, kernel.name]), kernel.duration / 1000, 1)
    # Kernels replayed from a CUDA graph have no caller in the profile.
    for (name, microseconds), calls in ran.items():
        if calls:
            yield KernelTime(name, classify([name]), calls * microseconds / 1000, calls)
