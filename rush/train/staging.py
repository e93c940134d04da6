"""Host memory that a state is copied to, so that training can go on while it is written."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import psutil  # type: ignore[import-untyped]
import torch
from torch import Tensor

from rush.errors import MachineError
from rush.parallel.placement import Part


class Staging:
    """Host memory that states are copied to, kept between saves."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def has_room(self, parts: Mapping[str, Mapping[str, Part]]) -> bool:
        """Whether the host has memory for a copy of what is not held yet."""
        needed = sum(part.values.nbytes for kind in parts.values() for part in kind.values())
        needed -= sum(buffer.nbytes for buffer in self._held.values())
        return needed <= 0 or needed * 1.25 < psutil.virtual_memory().available

    def get(self, parts: Mapping[str, Mapping[str, Part]]) -> None:
        """Take all memory that a copy will need; pages that were never touched are not there yet."""
        with contextlib.suppress(MachineError):  # told when it is needed
            for kind, named in parts.items():
                for name, part in named.items():
                    self._buffer(f"{kind}:{name}", part.values).zero_()

    def copy(self, parts: Mapping[str, Mapping[str, Part]]) -> dict[str, dict[str, Part]]:
        """The same parts, in memory that training does not change."""
        copied: dict[str, dict[str, Part]] = {kind: {} for kind in parts}
        on_device = False
        for kind, named in parts.items():
            for name, part in named.items():
                buffer = self._buffer(f"{kind}:{name}", part.values)
                buffer.copy_(part.values, non_blocking=True)
                on_device |= part.values.is_cuda
                copied[kind][name] = Part(buffer, part.offset, part.whole)
        if on_device:
            torch.cuda.synchronize()
        return copied

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        held = self._held.get(name)
        if held is None or held.shape != like.shape or held.dtype != like.dtype:
            try:
                held = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
            except RuntimeError as error:
                raise MachineError(
                    f"the host has no memory for a copy of the state ({error}); set run.save_async=false."
                ) from error
            self._held[name] = held
        return held
