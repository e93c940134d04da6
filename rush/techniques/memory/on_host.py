"""Saved activations in host memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

PIECE = 2**26
"""Bytes of a pinned buffer: the pinned allocator rounds up to a power of two, which could double large tensors."""


@dataclass(frozen=True)
class OffloadedTensor:
    """A tensor in host memory, in pieces."""

    pieces: tuple[Tensor, ...]
    dims: torch.Size
    strides: tuple[int, ...]
    device: torch.device

    def restore(self) -> Tensor:
        """The tensor on its device, with its strides, which a compiled backward pass requires."""
        whole = torch.empty(self.dims, dtype=self.pieces[0].dtype, device=self.device)
        for place, piece in zip(torch.split(whole.view(-1), len(self.pieces[0])), self.pieces, strict=True):
            place.copy_(piece, non_blocking=piece.is_pinned())
        if self.strides == whole.stride() or 0 in self.strides:  # (expanded tensors are materialized)
            return whole
        return torch.empty_strided(self.dims, self.strides, dtype=whole.dtype, device=self.device).copy_(
            whole
        )


@dataclass(frozen=True)
class OffloadedActivations:
    """The bytes of saved activations that were offloaded since the build."""

    moved: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class OffloadedInputs:
    """The bytes of inputs of recomputed blocks that were offloaded since the build."""

    moved: Counter[str] = field(default_factory=Counter)


class OffloadToHost(torch.autograd.graph.saved_tensors_hooks):
    """Saved tensors that are `wanted` are offloaded to the host; `moved` counts their bytes. With `pin` copies are
    asynchronous, in stream order."""

    def __init__(self, wanted: Callable[[Tensor], bool], moved: Counter[str], pin: bool) -> None:
        def pack(tensor: Tensor) -> Tensor | OffloadedTensor:
            if not wanted(tensor):
                return tensor
            pieces = []
            for part in torch.split(tensor.contiguous().view(-1), PIECE // tensor.element_size()):
                piece = torch.empty(part.shape, dtype=part.dtype, pin_memory=pin)
                pieces.append(piece.copy_(part, non_blocking=pin))
            moved["bytes"] += tensor.numel() * tensor.element_size()
            moved["pinned" if all(piece.is_pinned() for piece in pieces) else "pageable"] += 1
            return OffloadedTensor(tuple(pieces), tensor.shape, tensor.stride(), tensor.device)

        def unpack(packed: Tensor | OffloadedTensor) -> Tensor:
            return packed.restore() if isinstance(packed, OffloadedTensor) else packed

        super().__init__(pack, unpack)
