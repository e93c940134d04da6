"""Timing of large matmuls and copies for the ceilings, within a time budget.

Data is random: with zeros a chip draws less power and clocks higher. Shapes grow until the budget is spent: bf16 on a CPU without
bf16 instructions is hundreds of times slower than fp32, and a fixed number of large matmuls would take hours. Torch's global
generators are not used: a run that measures must sample the same random numbers as one with cached ceilings.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rush.hardware.samples import Sample
from rush.hardware.stopwatch import time_calls

DTYPES = ("float32", "tf32", "bfloat16", "float16", "float8", "int8")
HALF_KERNEL = "half_kernel"
"""`rush::fp16_matmul`: a matmul of fp32 matrices with fp16 operands. It is compiled on first use, which takes longer than measuring,
so it is measured only on request, after its module was loaded."""

_TORCH_DTYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8": torch.float8_e4m3fn,
    "int8": torch.int8,
    HALF_KERNEL: torch.float32,
}
# m, k, n of the matmuls; the last are MLP shapes.
_CPU_SHAPES = (
    (64, 64, 64),
    (128, 128, 128),
    (256, 256, 256),
    (512, 512, 512),
    (1024, 1024, 1024),
    (2048, 768, 3072),
)
_CUDA_SHAPES = (
    (1024, 1024, 1024),
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (16384, 2048, 8192),
    (16384, 8192, 2048),
)
_MIN_REPEATS = 3


def num_threads() -> int:
    """Number of torch's CPU threads."""
    return torch.get_num_threads()


def matmul(device: str, dtype: str, *, budget_s: float = 1.5) -> tuple[Sample, ...] | str:
    """Time matmuls in `dtype` over a few shapes; the reason if this device has none."""
    assert dtype in (*DTYPES, HALF_KERNEL), f"unknown dtype {dtype!r}"
    reason = _unsupported(device, dtype)
    if reason is not None:
        return reason
    samples: list[Sample] = []
    shapes = _CUDA_SHAPES if device == "cuda" else _CPU_SHAPES
    deadline = time.perf_counter() + budget_s
    with _precision(device, tf32=dtype == "tf32"), warnings.catch_warnings():
        # The slow fallback that torch warns of is what is measured.
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        for index, (rows, inner, columns) in enumerate(shapes):
            flops = 2.0 * rows * inner * columns
            remaining = deadline - time.perf_counter()
            # At the rate of the last shape, is there time for this one, warm-up included?
            if samples and (_MIN_REPEATS + 1) * flops / samples[-1].rate > remaining:
                continue
            if not _fits(device, 4 * (rows * inner + inner * columns + rows * columns)):
                continue
            work = _matmul(device, dtype, rows, inner, columns)
            seconds = _time(work, device, budget_s=max(remaining, 0) / (len(shapes) - index))
            samples.append(Sample(f"{rows}x{inner}x{columns}", flops, seconds))
            del work
    return tuple(samples)


def bandwidth(device: str, *, budget_s: float = 1.0, size: int = 2**28) -> dict[str, Sample]:
    """Time large copies within a device and, on CUDA, between host and device. `size`: bytes of a copy in a CPU's memory."""
    if device == "cuda":
        size = min(2**30, torch.cuda.mem_get_info()[0] // 8 // 2**20 * 2**20)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    results = {"copy": _copy("copy", _bytes(size, device), target, 2, budget_s)}
    if device != "cuda":
        return results
    size = 2**28
    card = _bytes(size, device)
    plain = _bytes(size, "cpu")
    pinned = plain.pin_memory()
    results["host_to_device"] = _copy("host_to_device", plain, card, 1, budget_s / 2)
    results["host_to_device_pinned"] = _copy("host_to_device_pinned", pinned, card, 1, budget_s / 2)
    results["device_to_host"] = _copy("device_to_host", card, plain, 1, budget_s / 2)
    results["device_to_host_pinned"] = _copy("device_to_host_pinned", card, pinned, 1, budget_s / 2)
    return results


def _unsupported(device: str, dtype: str) -> str | None:
    if dtype == "tf32":
        if device != "cuda":
            return "TF32 is a mode of NVIDIA tensor cores"
        if torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
            return "TF32 needs compute capability 8.0"
    if dtype == "float8":
        if device != "cuda":
            return "float8 matmuls need an accelerator"
        if torch.version.hip is not None:
            return "float8 matmuls are measured on NVIDIA devices only"
        if torch.cuda.get_device_capability() < (8, 9):
            return "float8 matmuls need compute capability 8.9"
    if dtype == "int8":
        if device != "cuda":
            return "int8 matmuls need an accelerator"
        if torch.version.hip is not None:
            return "int8 matmuls are measured on NVIDIA devices only"
        if torch.cuda.get_device_capability() < (8, 0):
            return "int8 matmuls need compute capability 8.0"
    if dtype == HALF_KERNEL:
        if device != "cpu":
            return "rush::fp16_matmul runs on ARM CPUs"
        assert hasattr(torch.ops.rush, "fp16_matmul"), "load rush.kernels.fp16_linear before measuring it"
    return None


def _matmul(device: str, dtype: str, rows: int, inner: int, columns: int) -> Callable[[], object]:
    """A closure that computes a matmul of two random matrices."""
    target = _TORCH_DTYPES[dtype]
    if dtype == "int8":
        # Rows of normal numbers, the largest at 127, as a layer scales them; casting truncates, which changes no rate.
        ints, others = (
            (32 * _normal(size, inner, device)).clamp(-127, 127).to(target) for size in (rows, columns)
        )
        return lambda: torch._int_mm(ints, others.t())
    left = _normal(rows, inner, device).to(target)
    # Transposed, as a linear layer stores its weight and fp8 kernels need it.
    right = _normal(columns, inner, device).to(target).t()
    if dtype == "float8":
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    if dtype == HALF_KERNEL:
        return lambda: torch.ops.rush.fp16_matmul(left, right, None)
    out = torch.empty(rows, columns, device=device, dtype=target)
    return lambda: torch.mm(left, right, out=out)


def _copy(case: str, source: Tensor, target: Tensor, passes: int, budget_s: float) -> Sample:
    device = "cuda" if "cuda" in (source.device.type, target.device.type) else source.device.type
    seconds = _time(lambda: target.copy_(source, non_blocking=True), device, budget_s=budget_s)
    return Sample(case, float(passes * source.numel()), seconds)


def _normal(rows: int, columns: int, device: str) -> Tensor:
    generator = torch.Generator(device).manual_seed(rows + columns)
    return torch.randn(rows, columns, device=device, generator=generator)


def _bytes(size: int, device: str) -> Tensor:
    """Random bytes, one mebibyte repeated: sampling all takes longer than copying."""
    tile = min(size, 2**20)
    generator = torch.Generator(device).manual_seed(size)
    drawn = torch.randint(0, 256, (tile,), dtype=torch.uint8, device=device, generator=generator)
    return drawn.repeat(size // tile)


def _fits(device: str, size_bytes: int) -> bool:
    """Whether twice this size is free on the device."""
    return device != "cuda" or 2 * size_bytes < torch.cuda.mem_get_info()[0]


def _time(work: Callable[[], object], device: str, budget_s: float) -> tuple[float, ...]:
    return tuple(time_calls(work, device, budget_s=budget_s, least=_MIN_REPEATS, window_s=0.0))


@contextlib.contextmanager
def _precision(device: str, *, tf32: bool) -> Iterator[None]:
    """Set the precision of fp32 matmuls on CUDA within the block."""
    if device != "cuda":
        yield
        return
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
