"""What every kernel needs: a way to refuse, to ask for a device, and to become an operator of torch.

Triton decides when a kernel is defined whether it is compiled for a GPU or interpreted on the CPU. So
`INTERPRETED` is settled once, when this module is first imported, by the same variable Triton reads.
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

_INTERPRETED_SMS = 4
"""As many programs as a small GPU would run at once: more than one, so that sums over programs are exercised."""


def require(condition: bool, sentence: str) -> None:
    """Refuse with this sentence unless the condition holds."""
    if not condition:
        raise KernelRefusal(sentence)


def require_device(op: str, *tensors: Tensor, has_cpu: bool = False) -> None:
    """All on one device, and one that can run the kernel: CUDA, or the CPU when interpreted or where it `has_cpu`, a
    kernel for one."""
    # Only comparisons, and messages made when they are needed: a compiler traces through this.
    device = tensors[0].device
    for tensor in tensors:
        if tensor.device != device:
            raise KernelRefusal(
                f"{op} needs its tensors on one device, found {device} and {tensor.device}; move them together."
            )
    if device.type not in ("cuda", "meta") and not ((INTERPRETED or has_cpu) and device.type == "cpu"):
        raise KernelRefusal(
            f"{op} runs on a CUDA device, found {device.type}; move the tensors there, or set TRITON_INTERPRET=1 "
            "before Python starts to have Triton interpret the kernel (slowly, for tests)."
        )


CPP_FIRST = False
"""Whether a kernel's side in C++ is taken even where Triton interprets: set by the bench, which needs both in one process."""


def uses_cpp(tensor: Tensor) -> bool:
    """Whether the kernel for a CPU, in C++, is to be taken: on a CPU, unless Triton interprets its own there."""
    return tensor.device.type == "cpu" and (CPP_FIRST or not INTERPRETED)


def op(name: str, *, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as the operator `rush::<name>`: opaque to the compiler, visible in a profile."""
    return torch.library.custom_op(f"rush::{name}", mutates_args=tuple(mutates))


def num_sms(device: torch.device) -> int:
    """Multiprocessors of a CUDA device: how many programs can run side by side at the least."""
    if device.type != "cuda":
        return _INTERPRETED_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def supports_pdl(device: torch.device) -> bool:
    """Whether a kernel can be launched while the one before it ends, to wait on the device instead of behind the host."""
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
    """The smallest power of two that is at least n: the widths of Triton's blocks."""
    return 1 << max(n - 1, 0).bit_length()


MAX_WIDTH = 65536
"""Elements of a row that one program can hold in registers."""


@dataclass(frozen=True)
class RowTile:
    """How a kernel that treats rows one by one cuts them: a program holds `rows` whole rows in registers."""

    rows: int
    width: int
    num_warps: int


def row_tile(width: int, elements_per_thread: int) -> RowTile:
    """A tile of whole rows: several where rows are short, one where they are long.

    Bytes in flight hide the latency of memory, so a thread holds 16 to 32 elements (two to four vectors of 16 bytes in
    bf16); more would cost the registers that let several programs share a multiprocessor.
    """
    block = max(16, next_power_of_2(width))
    rows = max(1, 2048 // block)
    num_warps = min(32, max(4, rows * block // (32 * elements_per_thread)))
    return RowTile(rows, block, num_warps)


@dataclass(frozen=True)
class RowWalk:
    """How a fixed number of programs walk over all rows: `rows` whole rows at a step, the next ones on their way."""

    rows: int
    width: int
    num_warps: int
    stages: int
    """Steps whose reads are under way or at work: 1 waits for each, 3 reads two steps ahead into shared memory."""
    programs_per_sm: int

    def programs(self, num_rows: int, device: torch.device) -> int:
        """As many as run side by side on this device, and none without a row; one where there are no rows."""
        steps = -(-num_rows // self.rows)
        return max(1, min(steps, self.programs_per_sm * num_sms(device)))


_WALK_BYTES = 96 * 1024
"""Shared memory for rows on their way: what every GPU since Ampere grants one program."""


def row_walk(width: int, element_sizes: Sequence[int]) -> RowWalk:
    """A walk that keeps memory busy while rows are reduced; `element_sizes` of the tensors that are read.

    A thread owns the same 8 columns (a vector of 16 bytes in bf16) of every row, so that its sums over rows need no
    other thread, or 16 where rows are wide; and enough rows at a step for 16 elements, which then share one barrier.
    """
    block = max(16, next_power_of_2(width))
    num_warps = min(16 if block <= 8192 else 32, max(4, block // 256))
    rows = max(1, 16 * 32 * num_warps // block)
    ahead = _WALK_BYTES // (rows * block * sum(element_sizes))
    # Such a thread takes up to 128 registers, and a multiprocessor has those for 16 warps.
    return RowWalk(rows, block, num_warps, stages=1 + min(2, ahead), programs_per_sm=max(1, 16 // num_warps))


def as_rows(x: Tensor) -> Tensor:
    """[..., width] as [rows, width] whose elements of a row lie side by side: a view where that is possible."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def empty_bthd(like_bhtd: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of this shape whose memory is [b, t, h, d]: the layer after attention reads it without a copy."""
    batch, num_heads, length, head_dim = like_bhtd.shape
    return like_bhtd.new_empty(batch, length, num_heads, head_dim, dtype=dtype).transpose(1, 2)
