"""Profile a step or two of a run: the observation that evidence functions read.

A profile lists every operator with the shapes and dtypes of its inputs, and every kernel with its time. Compiled code calls
matmuls through the same operators. Where a step is replayed from a captured CUDA graph, or its matmuls are generated kernels,
operators do not show; then one more step runs without graph and compiler (`eager_step`). Nothing is concluded from what was asked for, only from what ran.

Legend: a matmul is (rows, inner, columns).
"""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from rush.data import Batch
from rush.hardware import peak_memory_bytes, reset_peak_memory
from rush.models.adapted_linears import NAMES as ADAPTED
from rush.models.adapters import adapters
from rush.profiling.breakdown import breakdown, callers, kernel_times, longest
from rush.profiling.calls import DTYPES, calls, is_kept
from rush.profiling.comm_overlap import comm_time
from rush.techniques.api.contract import Observation
from rush.techniques.api.evidence import compile_counts
from rush.techniques.api.facts import CompileCounts
from rush.training.build import FORWARD, Run
from rush.training.step import launch_step

DATA = "rush::data"
# The index of the first operand among an operator's inputs.
_MATMULS = {
    "aten::mm": 0, "aten::addmm": 1, "aten::addmm_": 1, "aten::_scaled_mm": 0, "aten::_int_mm": 0,
}  # fmt: skip
_BATCHED = {"aten::bmm": 0, "aten::baddbmm": 1}


def observe(run: Run, batches: Callable[[], list[Batch]], steps: int = 2) -> Observation:
    """Profile `steps` optimizer steps; the caller has warmed the run up.

    `batches` returns the micro batches of the next step; its time is the wait for data.
    """
    before = run.facts.compiled_before or compile_counts()
    seen = _profiled(run, batches, steps)
    if not seen.matmul_shapes:
        with torch.compiler.set_stance("force_eager"), _unwrapped(run):
            eager = _profiled(run, batches, 1)
        seen = replace(
            seen,
            eager_step=True,
            matmul_shapes=eager.matmul_shapes,
            matmuls_by_op=eager.matmuls_by_op,
            matmul_dtypes=eager.matmul_dtypes,
            largest_tensor=eager.largest_tensor,
            held_bytes=eager.held_bytes,
            block_forwards=eager.block_forwards,
            calls=eager.calls,
        )
    return replace(seen, compiled=compile_counts() - before)


def _profiled(run: Run, batches: Callable[[], list[Batch]], steps: int) -> Observation:
    on_gpu = run.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    waited = 0.0
    with run.in_step():
        gc_enabled, fp32_matmul_error = gc.isenabled(), _fp32_matmul_error(run.device)
    gc.collect()  # garbage collected in a pass would count against its saved activations
    reset_peak_memory(run.device.type)
    launched, given = [], list[Batch]()
    # Without acc_events the profiler warns on its first use in a process.
    with profile(activities=activities, record_shapes=True, profile_memory=True, acc_events=True) as prof:
        began = time.perf_counter()
        for step in range(1, steps + 1):
            asked = time.perf_counter()
            with record_function(DATA):
                given = batches()
            waited += time.perf_counter() - asked
            launched.append(launch_step(run, step, run.recipe.optimizer.lr, given))
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    skipped = sum(step.result().skipped for step in launched)
    peak = peak_memory_bytes(run.device.type)
    assert prof.profiler is not None
    assert prof.profiler.kineto_results is not None
    operands = {*_MATMULS, *_own_ops(run)}
    input_dtypes = {
        event.correlation_id(): event.dtypes()
        for event in prof.profiler.kineto_results.events()
        if event.name() in operands or event.name() in _BATCHED or is_kept(event.name())
    }
    # Work of the loader is not the step's.
    events = [event for event in (prof.events() or []) if DATA not in callers(event)]
    host = [event for event in events if event.device_type == DeviceType.CPU]
    counts = _matmuls(host, input_dtypes, run)
    kernels: Counter[str] = Counter()
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            kernels[event.name] += event.time_range.elapsed_us() / 1000
    forwards = [event for event in host if event.name == FORWARD]
    held = [event.device_memory_usage if on_gpu else event.cpu_memory_usage for event in forwards]
    times = kernel_times(events, on_gpu=on_gpu)
    comm = comm_time(events, steps=steps, on_gpu=on_gpu)
    return Observation(
        kernels=dict(kernels),
        ops=dict(Counter(event.name for event in host)),
        matmul_dtypes=frozenset(counts.dtypes),
        matmul_shapes={shape: count / steps for shape, count in counts.shapes.items()},
        weight_dtypes=frozenset(_name(p.dtype) for p in run.model.parameters()),
        state_bytes=state_bytes(run.optimizer),
        num_parameters=sum(p.numel() for p in run.model.parameters() if p.requires_grad),
        block_forwards=_block_forwards(run, counts.shapes, len(forwards)),
        largest_tensor=counts.largest,
        held_bytes=max(held, default=0),
        compiled=CompileCounts(),
        micro_batches=len(forwards) // steps or len(given),
        step_ms=1000 * seconds / steps,
        data_wait_ms=1000 * waited / steps,
        peak_memory_bytes=peak,
        breakdown_ms=breakdown(times, wall_ms=1000 * seconds, data_ms=1000 * waited, steps=steps),
        matmuls_by_op={name: count / steps for name, count in counts.by.items()},
        eager_step=False,
        fp32_matmul_error=fp32_matmul_error,
        gc_enabled=gc_enabled,
        pinned=on_gpu and all(batch.tokens_bt.is_pinned() for batch in given),
        loader_threads=_loader_threads(),
        loader_micro_batches=len(given),
        micro_tokens=launched[-1].batches[0].tokens_bt.numel(),
        skipped_steps=skipped,
        comm_ms=comm.total_ms,
        exposed_comm_ms=comm.exposed_ms,
        shape=run.model.shape,
        holds_head=run.model.holds("head.weight"),
        facts=run.facts,
        longest=longest(times, steps=steps),
        calls=calls(host, input_dtypes),
    )


@dataclass
class _MatmulCounts:
    """Matmuls by shape and by operator, the dtypes of their operands, and the largest tensor read."""

    shapes: Counter[tuple[int, int, int]]
    by: Counter[str]
    dtypes: set[str]
    largest: int


def _own_ops(run: Run) -> dict[str, str]:
    """Matmul operators of the run's techniques, with the dtype that they cast their operands to."""
    return {op: dtype for use in run.uses for op, dtype in use.technique.matmul_ops.items()}


def _matmuls(host: list[FunctionEvent], dtypes: Mapping[int, list[str]], run: Run) -> _MatmulCounts:
    found: Counter[tuple[int, int, int]] = Counter()
    by: Counter[str] = Counter()
    seen_dtypes: set[str] = set()
    largest = 0
    sizes = {p.numel() for p in run.model.parameters()}
    own_ops = _own_ops(run)
    operands = {**_MATMULS, **dict.fromkeys(own_ops, 0)}
    again = _recorded_twice(host, operands, _vocabularies(run))
    for event in host:
        shapes: Any = event.input_shapes or []
        for shape in shapes:
            elements = _elements(shape)
            if elements > largest and elements not in sizes:
                largest = elements
        first = operands.get(event.name, _BATCHED.get(event.name))
        if first is None or len(shapes) < first + 2 or event.id in again:
            continue
        read = {DTYPES.get(dtype, dtype) for dtype in dtypes[event.id][first : first + 2]}
        seen_dtypes |= {own_ops[event.name]} if event.name in own_ops else read
        if event.name in operands:
            (rows, inner), (_, columns) = shapes[first : first + 2]
            found[rows, inner, columns] += 1
            by[event.name] += 1
    return _MatmulCounts(found, by, seen_dtypes, largest)


def _recorded_twice(
    host: list[FunctionEvent], operands: Mapping[str, int], vocabularies: set[int]
) -> set[int]:
    """Events of matmuls that computed nothing themselves.

    Under a dispatch mode (selective checkpointing) an operator is recorded once when the mode handles it and once,
    inside, when it runs. In the recomputation the mode returns saved activations, and nothing is inside. (It handles layers
    with adapters as one operator: matmuls inside of that ran.)
    """
    matmuls = [event for event in host if event.name in operands]
    taken: set[int] = set()
    ran_inside: set[int] = set()
    for event in matmuls:
        above = event.cpu_parent
        while above is not None and above.name != event.name:
            above = above.cpu_parent
        if above is not None:
            taken.add(above.id)
            ran_inside.add(event.id)
    if not any(_is_layers(event, vocabularies) for event in matmuls if event.id in taken):
        return taken  # the head alone: a matmul of DTensors is recorded like this, too
    # A layer's forward pass: torch's own, or that of an autograd.Function, which a profile names like its backward pass.
    forwards = {"aten::linear", "aten::matmul"}
    forwards |= {event.name.removesuffix("Backward") for event in host if event.name.endswith("Backward")}
    returned = {
        event.id
        for event in matmuls
        if event.id not in ran_inside
        and forwards.intersection(callers(event))
        and not {FORWARD, *ADAPTED}.intersection(callers(event))
    }
    return taken | returned


def _vocabularies(run: Run) -> set[int]:
    """Possible widths of a matmul with the vocabulary: as it is, as a technique pads it, or as a compiler does."""
    size = run.model.shape.vocab_size
    return {size, run.head_width, *(-(-size // grain) * grain for grain in (4, 8, 16))}


def _is_layers(event: FunctionEvent, vocabularies: set[int]) -> bool:
    """Whether a matmul is a block's: the head's has the vocabulary as a dim."""
    shapes: Any = event.input_shapes or []
    return not vocabularies & {size for shape in shapes for size in shape if isinstance(size, int)}


def _elements(shape: Any) -> int:
    """Elements of a tensor of this shape; 0 for a scalar or a list of tensors."""
    if not shape or not all(isinstance(size, int) for size in shape):
        return 0
    return int(torch.Size(shape).numel())


def _block_forwards(run: Run, matmuls: Mapping[tuple[int, int, int], int], num_passes: int) -> float:
    """From counts: a linear layer is one matmul forward and two backward (one, if its weight is frozen); any more were
    recomputed.

    Matmuls with the vocabulary as a dim are the head's, those with the rank of an adapter are its own; neither count. Layers
    that a technique fuses into one matmul (it notes how many that saves) are one layer here.
    """
    linears = [
        module for role, layers in run.model.linears().items() if role != "head" for _, module in layers
    ]
    others = _vocabularies(run)
    # Up to three adapters of one input share a matmul.
    others |= {n * adapter.spec.rank for _, _, adapter in adapters(run.model) for n in (1, 2, 3)}
    if any(others & {module.in_features, module.out_features} for module in linears):
        return 0.0  # a vocabulary as wide as a layer: the head's matmuls cannot be told apart
    count = sum(count for shape, count in matmuls.items() if not others.intersection(shape))
    backward = sum(
        2 if any(p.requires_grad for p in module.parameters(recurse=False)) else 1 for module in linears
    )
    saved = run.facts.matmuls_saved
    # Each stage of a rank has its own pass.
    num_passes //= len(run.roots)
    forward = count / num_passes - (backward - 2 * saved) if num_passes else 0.0
    return max(0.0, forward) / (len(linears) - saved)


@torch.no_grad()
def _fp32_matmul_error(device: torch.device) -> float:
    """The relative error of an fp32 matmul.

    About 1e-7 in fp32; a thousand times more where operands are rounded to a shorter mantissa (tf32).
    """
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(512, 512, generator=generator) for _ in range(2))
    exact = left.double() @ right.double()
    product = (left.to(device) @ right.to(device)).cpu().double()
    return float((product - exact).norm() / exact.norm())


@contextmanager
def _unwrapped(run: Run) -> Iterator[None]:
    """The run without the wrappers of its passes (captured graphs)."""
    wrapped = run.micro_pass
    run.micro_pass = run.innermost
    try:
        yield
    finally:
        run.micro_pass = wrapped


def state_bytes(optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of the optimizer's state by dtype, without step counters."""
    found: Counter[str] = Counter()
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and key != "step":
                found[_name(value.dtype)] += value.numel() * value.element_size()
    return dict(found)


def _loader_threads() -> int:
    return sum(thread.name.startswith("rush-loader") for thread in threading.enumerate())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
