"""The input of one forward pass.

Legend: b rows, t positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

IGNORED = -100
"""A label that is no target."""
TENSORS = ("tokens_bt", "labels_bt", "positions_bt", "documents_bt", "starts_n", "reference_b")


@dataclass(frozen=True)
class Batch:
    tokens_bt: Tensor
    """int64"""
    labels_bt: Tensor
    """int64; labels_bt[b, t] is the token that follows tokens_bt[b, t], or `IGNORED`."""
    samples: Sequence[str] = ()
    """Names of the rows, for messages."""
    positions_bt: Tensor | None = None
    """Where each token stands in its document; counted along the row without it."""
    documents_bt: Tensor | None = None
    """The number of each token's document; attention stays within it. One document a row without it."""
    starts_n: Tensor | None = None
    """int32; where each document begins in the flattened batch, and the end, repeated up to a fixed length."""
    reference_b: Tensor | None = None
    """What a reference model gives each row, where it was computed beforehand."""
    padding: int = 0
    """Tokens that only fill up a shape."""
    paired: bool = False
    """Rows are the chosen answers of some pairs, then the rejected ones of the same pairs, in the same order."""

    @cached_property
    def num_labels(self) -> int:
        # By numpy: torch would wake its threads for it, which on some machines takes longer than the count.
        return int(np.count_nonzero(self.labels_bt.cpu().numpy() != IGNORED))

    @property
    def num_real(self) -> int:
        """Tokens without padding."""
        return self.tokens_bt.numel() - self.padding

    def tensors(self) -> dict[str, Tensor]:
        """Those it has, by name."""
        found = {name: getattr(self, name) for name in TENSORS}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with every tensor changed."""
        return replace(self, **{name: change(tensor) for name, tensor in self.tensors().items()})  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> Batch:
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> Batch:
        """In memory that a device reads without a copy in between."""
        return self.each(lambda tensor: tensor.pin_memory())

    def split(self, parts: int) -> list[Batch]:
        """Rows dealt into `parts` batches, in order; what was padding is counted in the first. Pairs stay together."""
        if self.paired:
            return self._split_pairs(parts)
        pieces = {name: tensor.chunk(parts) for name, tensor in self.tensors().items() if name != "starts_n"}
        count = len(pieces["tokens_bt"])
        names = -(-len(self.samples) // count) if count else 0
        return [
            Batch(
                **{name: chunks[part] for name, chunks in pieces.items()},  # type: ignore[arg-type]
                # Of a row that is cut among ranks the documents are told whole, and `starts_n` with them.
                starts_n=self._starts_of(part, pieces.get("documents_bt", pieces["tokens_bt"])),
                samples=self.samples[part * names : (part + 1) * names],
                padding=self.padding if part == 0 else 0,
            )
            for part in range(count)
        ]

    def _split_pairs(self, parts: int) -> list[Batch]:
        pairs = self.tokens_bt.shape[0] // 2
        whole: list[Batch] = []
        for some in torch.arange(pairs).chunk(parts):
            first, last = int(some[0]), int(some[-1]) + 1
            rows = [*range(first, last), *range(pairs + first, pairs + last)]
            part = self.each(
                lambda x, a=first, z=last: torch.cat((x[a:z], x[pairs + a : pairs + z]))  # type: ignore[misc]
            )
            names = [self.samples[row] for row in rows] if self.samples else ()
            whole.append(replace(part, samples=names, padding=0 if whole else self.padding))
        return whole

    def _starts_of(self, part: int, tokens_bt: Sequence[Tensor]) -> Tensor | None:
        """The beginnings within a part; documents outside of it become empty ones at its ends."""
        if self.starts_n is None:
            return None
        before = sum(tokens.numel() for tokens in tokens_bt[:part])
        return (self.starts_n - before).clamp(0, tokens_bt[part].numel())
