"""Ranks that share a GPU, for correctness: what gloo lacks there.

NCCL refuses two ranks on one device, so they talk through gloo. Its plain exchanges copy between device and host by
themselves, but the functional gather (which tensor and context parallelism use) reads a device's memory from the host, and
the process dies without a word. Here that one operator is given a kernel for CUDA tensors that goes through the plain
exchange instead. Nothing of it is fast, and nothing of it is there where each rank has a device of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library: torch.library.Library | None = None


def gather_through_host(device: str = "CUDA") -> None:
    """Let the functional gather of this process's tensors on `device` be a plain one. Once a process is enough."""
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
