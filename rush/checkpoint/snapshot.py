"""Copies of the training state in host memory, so that training continues while they are written.

Tensors that only the optimizer step changes need not be copied at once: the next forward and backward pass only read them. So
those in host memory are copied by the thread that writes them, and the next optimizer step waits for the rest.

Where the host has no memory for a copy (`NoHostMemory`), the state is written in place while training waits.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rush.hardware.memory_use import free_host_memory, trim_heap
from rush.parallel.placement import TensorShard

MARGIN = 1.1
"""Free memory that a copy needs, in multiples of its bytes."""


def staged_bytes(like: Tensor) -> int:
    """Host memory of a copy: torch allocates pinned memory in powers of two."""
    return 1 << (like.nbytes - 1).bit_length() if like.is_cuda and like.nbytes else like.nbytes


@dataclass
class StagedCopy:
    """A copy of the state, perhaps still under way."""

    shards: dict[str, dict[str, TensorShard]]
    """The copied values, once `finish` has returned."""
    left: list[tuple[Tensor, Tensor]]
    """Copies still to be made: (target, source)."""
    _finished: threading.Event = field(default_factory=threading.Event)
    _finished_at: float = math.inf
    _wanted_at: float = math.inf

    def finish(self) -> None:
        """Make the copies that are left; called by the thread that writes them."""
        try:
            for target, source in self.left:
                target.copy_(source)
        finally:  # the optimizer step must not wait forever
            self.left, self._finished_at = [], time.perf_counter()
            self._finished.set()

    def wait(self) -> None:
        """Wait for `finish`; called before the source tensors change."""
        self._wanted_at = min(self._wanted_at, time.perf_counter())
        self._finished.wait()

    @property
    def waited_s(self) -> float:
        """Seconds that `wait` took, once `finish` has returned."""
        return max(0.0, self._finished_at - self._wanted_at)


class NoHostMemory(Exception):
    """The host has no memory for a copy of the state."""


class Staging:
    """Host buffers for copies, kept between saves."""

    def __init__(self, free_bytes: Callable[[], float] = free_host_memory) -> None:
        self._free_bytes = free_bytes
        """What may be allocated beyond the buffers that exist."""
        self._buffers: dict[str, Tensor] = {}

    def check_room(self, shards: Mapping[str, Mapping[str, TensorShard]]) -> None:
        """Raise NoHostMemory unless the host has memory for the buffers that do not exist yet."""
        needed = 0
        for kind, named in shards.items():
            for name, shard in named.items():
                needed += 0 if f"{kind}:{name}" in self._buffers else staged_bytes(shard.values)
        if needed and (free := self._free_bytes()) < MARGIN * needed:
            raise NoHostMemory(
                f"it takes {needed / 2**30:.2f} GiB, and {max(0.0, free) / 2**30:.2f} are free for it"
            )

    def allocate(self, shards: Mapping[str, Mapping[str, TensorShard]]) -> None:
        """Allocate and touch all buffers of a copy."""
        with contextlib.suppress(NoHostMemory):  # raised again when the buffer is needed
            for kind, named in shards.items():
                for name, shard in named.items():
                    self._buffer(f"{kind}:{name}", shard.values).zero_()

    def release(self) -> None:
        self._buffers.clear()
        trim_heap()

    def copy(
        self, shards: Mapping[str, Mapping[str, TensorShard]], may_wait: Callable[[str, str], bool]
    ) -> StagedCopy:
        """Start a copy; shards in host memory that `may_wait` (by kind and name) are left to `finish`."""
        copy = StagedCopy({kind: {} for kind in shards}, [])
        on_device = False
        for kind, named in shards.items():
            for name, shard in named.items():
                buffer = self._buffer(f"{kind}:{name}", shard.values)
                copy.shards[kind][name] = TensorShard(buffer, shard.offset, shard.full_shape)
                if shard.values.device.type == "cpu" and may_wait(kind, name):
                    copy.left.append((buffer, shard.values))
                    continue
                buffer.copy_(shard.values, non_blocking=True)
                on_device |= shard.values.is_cuda
        if on_device:
            torch.cuda.synchronize()
        return copy

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            try:
                buffer = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
            except (RuntimeError, MemoryError) as error:
                raise NoHostMemory(
                    str(error).splitlines()[0] if str(error) else "the allocation failed"
                ) from error
            self._buffers[name] = buffer
        return buffer
