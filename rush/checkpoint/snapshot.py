"""Host memory that a state is copied to, so that training can go on while it is written.

What only an update of the weights changes need not be copied at once: the next forward and backward pass read it too. So what
lies in host memory is copied beside them, by the thread that will write it, and the update waits for the rest.

The copy is a convenience, and never worth the run: where the host has no memory for it, `NoHostMemory` says why, and the state is
written from where it is while training waits.
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

from rush.hardware.memory_use import give_back_freed, host_room
from rush.parallel.placement import TensorShard

MARGIN = 1.1
"""Times the bytes of a copy that must be free."""


def staged_bytes(like: Tensor) -> int:
    """What a copy of it takes of the host: torch's pinned memory comes in powers of two."""
    return 1 << (like.nbytes - 1).bit_length() if like.is_cuda and like.nbytes else like.nbytes


@dataclass
class Copy:
    """A state on its way to memory that training does not change."""

    parts: dict[str, dict[str, TensorShard]]
    """Where it is, once `finish` has been called."""
    left: list[tuple[Tensor, Tensor]]
    """What is still to be copied, as pairs of to and from."""
    _finished: threading.Event = field(default_factory=threading.Event)
    _finished_at: float = math.inf
    _wanted_at: float = math.inf

    def finish(self) -> None:
        """Copy what is left; called by the thread that will write it."""
        try:
            for to, of in self.left:
                to.copy_(of)
        finally:  # whatever happens, an update must not wait for ever
            self.left, self._finished_at = [], time.perf_counter()
            self._finished.set()

    def wait(self) -> None:
        """Let it be finished; called before what is copied changes."""
        self._wanted_at = min(self._wanted_at, time.perf_counter())
        self._finished.wait()

    @property
    def waited_s(self) -> float:
        """What `wait` took, once it is finished."""
        return max(0.0, self._finished_at - self._wanted_at)


class NoHostMemory(Exception):
    """The host has no memory for a copy of the state."""


class Staging:
    """Host memory that states are copied to, kept between saves."""

    def __init__(self, room: Callable[[], float] = host_room) -> None:
        self._room = room
        """Bytes that it may take besides what it holds."""
        self._held: dict[str, Tensor] = {}

    def check_room(self, parts: Mapping[str, Mapping[str, TensorShard]]) -> None:
        """NoHostMemory unless the host has memory for a copy of what is not held yet."""
        needed = 0
        for kind, named in parts.items():
            for name, part in named.items():
                held = self._held.get(f"{kind}:{name}")
                needed += staged_bytes(part.values) if held is None else 0
        if needed and (room := self._room()) < MARGIN * needed:
            raise NoHostMemory(
                f"it takes {needed / 2**30:.2f} GiB, and {max(0.0, room) / 2**30:.2f} are free for it"
            )

    def get(self, parts: Mapping[str, Mapping[str, TensorShard]]) -> None:
        """Take all memory that a copy will need; pages that were never touched are not there yet."""
        with contextlib.suppress(NoHostMemory):  # told when it is needed
            for kind, named in parts.items():
                for name, part in named.items():
                    self._buffer(f"{kind}:{name}", part.values).zero_()

    def let_go(self) -> None:
        """Give back all that is held."""
        self._held.clear()
        give_back_freed()

    def copy(
        self, parts: Mapping[str, Mapping[str, TensorShard]], may_wait: Callable[[str, str], bool]
    ) -> Copy:
        """Begin to copy these parts; those that `may_wait` (by kind and name) and lie in host memory are left to `finish`."""
        copy = Copy({kind: {} for kind in parts}, [])
        on_device = False
        for kind, named in parts.items():
            for name, part in named.items():
                buffer = self._buffer(f"{kind}:{name}", part.values)
                copy.parts[kind][name] = TensorShard(buffer, part.offset, part.whole)
                if part.values.device.type == "cpu" and may_wait(kind, name):
                    copy.left.append((buffer, part.values))
                    continue
                buffer.copy_(part.values, non_blocking=True)
                on_device |= part.values.is_cuda
        if on_device:
            torch.cuda.synchronize()
        return copy

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        held = self._held.get(name)
        if held is None or held.shape != like.shape or held.dtype != like.dtype:
            try:
                held = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
            except (RuntimeError, MemoryError) as error:
                raise NoHostMemory(
                    str(error).splitlines()[0] if str(error) else "the allocation failed"
                ) from error
            self._held[name] = held
        return held
