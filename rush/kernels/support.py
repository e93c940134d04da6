"""What every kernel shares: checks of its arguments, registration as a torch operator, tile sizes for rows.

Triton decides when a kernel is defined whether to compile it for a GPU or interpret it on the CPU. So `INTERPRETED` is
set once, when this module is first imported, by the environment variable that Triton reads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rush.errors import KernelRefusal

INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
"""Whether kernels run in Triton's interpreter."""

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_INTERPRETED_SMS = 4
"""More than one, so that reductions across programs are tested."""


def require(condition: bool, message: str) -> None:
    """Raise a KernelRefusal unless the condition holds."""
    if not condition:
        raise KernelRefusal(message)


def require_device(op: str, *tensors: Tensor, has_cpu: bool = False) -> None:
    """All tensors must be on one device that runs the kernel: CUDA, or a CPU if interpreted or if the op `has_cpu` code."""
    # Messages are formatted only on failure: torch.compile traces through this.
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device:
            raise KernelRefusal(
                f"{op} needs its tensors on one device, found {device} and {tensor.device}; move them together."
            )
    if device.type not in ("cuda", "meta") and not ((INTERPRETED or has_cpu) and device.type == "cpu"):
        raise KernelRefusal(
            f"{op} runs on a CUDA device, found {device.type}; move the tensors there, or set TRITON_INTERPRET=1 "
            "before Python starts to run Triton's interpreter (slow, for tests)."
        )


CPP_FIRST = False
"""Prefer the C++ kernel even under Triton's interpreter: set by the bench, which needs both in one process."""


def uses_cpp(tensor: Tensor) -> bool:
    """Whether to run the C++ kernel: on a CPU, unless Triton's interpreter is on."""
    return tensor.device.type == "cpu" and (CPP_FIRST or not INTERPRETED)


def op(name: str, *, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as the custom operator `rush::<name>`: opaque to torch.compile, visible in a profile."""
    return torch.library.custom_op(f"rush::{name}", mutates_args=tuple(mutates))


def num_sms(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device."""
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def supports_pdl(device: torch.device) -> bool:
    """Whether the device has programmatic dependent launch: a kernel starts while the one before it ends."""
    return (
        device.type == "cuda"
        and not INTERPRETED
        and torch.version.hip is None
        and _capability(device) >= (9, 0)
    )


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


MAX_WIDTH = 65536
"""Elements per row that one program can hold in registers."""


@dataclass(frozen=True)
class RowTile:
    """The tile of a row-wise kernel: a program holds `rows` whole rows in registers."""

    rows: int
    width: int
    num_warps: int


def row_tile(width: int, elements_per_thread: int) -> RowTile:
    """A tile of whole rows: several short ones or one long one.

    Bytes in flight hide memory latency, so a thread holds 16 to 32 elements (two to four 16-byte vectors in bf16); more
    would take the registers that let several programs share an SM.
    """
    block = max(16, next_power_of_2(width))
    rows = max(1, 2048 // block)
    num_warps = min(32, max(4, rows * block // (32 * elements_per_thread)))
    return RowTile(rows, block, num_warps)


@dataclass(frozen=True)
class PersistentRows:
    """The tile of a persistent row-wise kernel: a fixed number of programs loop over all rows, `rows` at a step."""

    rows: int
    width: int
    num_warps: int
    stages: int
    """Software pipelining: 1 loads without prefetch, 3 prefetches two steps ahead into shared memory."""
    programs_per_sm: int

    def programs(self, num_rows: int, device: torch.device) -> int:
        """As many as are resident at once, each with at least one row; one where there are no rows."""
        steps = -(-num_rows // self.rows)
        return max(1, min(steps, self.programs_per_sm * num_sms(device)))


_PREFETCH_BYTES = 96 * 1024
"""Shared memory for prefetched rows: available per program on every GPU since Ampere."""


def persistent_rows(width: int, element_sizes: Sequence[int]) -> PersistentRows:
    """Tiles that keep memory busy during the reductions; `element_sizes` are those of the tensors that are read.

    A thread owns the same 8 columns (a 16-byte vector in bf16) of every row, 16 where rows are wide, so its sums over
    rows need no other thread; a step has enough rows for 16 elements per thread, which share one barrier.
    """
    block = max(16, next_power_of_2(width))
    num_warps = min(16 if block <= 8192 else 32, max(4, block // 256))
    rows = max(1, 16 * 32 * num_warps // block)
    prefetched = _PREFETCH_BYTES // (rows * block * sum(element_sizes))
    # A thread takes up to 128 registers; an SM has those for 16 warps.
    return PersistentRows(
        rows, block, num_warps, stages=1 + min(2, prefetched), programs_per_sm=max(1, 16 // num_warps)
    )


def as_rows(x: Tensor) -> Tensor:
    """[..., width] as [rows, width] with unit stride in the last dim: a view where possible."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def empty_bthd(like_bhtd: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty [b, h, t, d] tensor whose memory layout is [b, t, h, d]: the next linear layer needs no copy."""
    batch, num_heads, length, head_dim = like_bhtd.shape
    return like_bhtd.new_empty(batch, length, num_heads, head_dim, dtype=dtype).transpose(1, 2)
