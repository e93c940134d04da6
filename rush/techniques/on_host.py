"""What autograd keeps for the backward pass, kept in host memory instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

PIECE = 2**26
"""Bytes of a piece of pinned memory: its allocator rounds up to a power of two, which would double large tensors."""


@dataclass(frozen=True)
class Away:
    """A tensor that waits on the host, in pieces."""

    pieces: tuple[Tensor, ...]
    like: Tensor
    """Its sizes and strides, without memory: a compiled backward pass asks for both as they were."""
    device: torch.device

    def back(self) -> Tensor:
        whole = torch.empty_like(self.like, device=self.device)
        for place, piece in zip(torch.split(in_memory(whole), len(self.pieces[0])), self.pieces, strict=True):
            place.copy_(piece, non_blocking=piece.is_pinned())
        return whole


def in_memory(dense: Tensor) -> Tensor:
    """The numbers of a tensor without gaps, in the order in which they lie in memory."""
    return dense.as_strided((dense.numel(),), (1,))


class OnHost(torch.autograd.graph.saved_tensors_hooks):
    """Within this context, what is kept and `wanted` waits on the host; `moved` counts its bytes.

    With `pin` the device reads and writes the host's memory by itself, in the order of its stream, and nobody waits.
    """

    def __init__(self, wanted: Callable[[Tensor], bool], moved: Counter[str], pin: bool) -> None:
        def pack(tensor: Tensor) -> Tensor | Away:
            if not wanted(tensor):
                return tensor
            # Without gaps, and with the same strides where it had none.
            like = torch.empty_like(tensor, device="meta")
            dense = tensor if tensor.stride() == like.stride() else torch.empty_like(tensor).copy_(tensor)
            pieces = []
            for part in torch.split(in_memory(dense), PIECE // tensor.element_size()):
                piece = torch.empty(part.shape, dtype=part.dtype, pin_memory=pin)
                pieces.append(piece.copy_(part, non_blocking=pin))
            moved["bytes"] += tensor.numel() * tensor.element_size()
            return Away(tuple(pieces), like, tensor.device)

        def unpack(packed: Tensor | Away) -> Tensor:
            return packed.back() if isinstance(packed, Away) else packed

        super().__init__(pack, unpack)
