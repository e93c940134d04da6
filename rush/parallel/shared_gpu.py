"""Ranks that share a GPU, for correctness only: the all-gather that gloo lacks there.

NCCL refuses two ranks on one device, so they use gloo. Its c10d collectives copy between device and host, but the functional
all-gather (which tensor and context parallelism use) reads device memory from the host and crashes. Here that operator gets a
CUDA kernel that calls the c10d one. It is slow, and never registered where each rank has its own device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library: torch.library.Library | None = None


def gather_through_host(device: str = "CUDA") -> None:
    """Register the all-gather for tensors on `device`, once per process."""
    global _library
    if _library is None:
        _library = torch.library.Library("_c10d_functional", "IMPL", device)  # type: ignore[no-untyped-call]
        _library.impl("all_gather_into_tensor", _gather)  # type: ignore[no-untyped-call]


def _gather(own: Tensor, num_ranks: int, group_name: str) -> Tensor:
    import torch.distributed.distributed_c10d as c10d

    group = c10d._resolve_process_group(group_name)  # type: ignore[attr-defined, arg-type]
    whole = own.new_empty((num_ranks * own.shape[0], *own.shape[1:]))
    c10d.all_gather(list(whole.chunk(num_ranks)), own.contiguous(), group=group)
    return whole
