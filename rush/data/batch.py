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
"""Label of positions without a loss."""
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
    """Position of each token in its document; without it, in the row."""
    documents_bt: Tensor | None = None
    """Document id of each token, within which it attends; without it, a row is one document."""
    starts_n: Tensor | None = None
    """int32; document starts in the flattened batch, then the end, repeated to a fixed length."""
    reference_b: Tensor | None = None
    """Precomputed log-probabilities of a reference model, by row."""
    padding: int = 0
    """Number of padding tokens."""
    paired: bool = False
    """Rows are the chosen answers of some pairs, then the rejected ones, in the same order."""

    @cached_property
    def num_labels(self) -> int:
        # By numpy: torch would wake its thread pool, which can take longer than the count.
        return int(np.count_nonzero(self.labels_bt.cpu().numpy() != IGNORED))

    @property
    def num_real(self) -> int:
        """Tokens without padding."""
        return self.tokens_bt.numel() - self.padding

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are set, by name."""
        found = {name: getattr(self, name) for name in TENSORS}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with `change` applied to every tensor."""
        return replace(self, **{name: change(tensor) for name, tensor in self.tensors().items()})  # type: ignore[arg-type]

    def to(self, device: torch.device | str) -> Batch:
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin(self) -> Batch:
        """In pinned memory."""
        return self.each(lambda tensor: tensor.pin_memory())

    def split(self, parts: int) -> list[Batch]:
        """Split the rows into `parts` batches, in order; pairs stay together. Padding is counted in the first."""
        if self.paired:
            return self._split_pairs(parts)
        pieces = {name: tensor.chunk(parts) for name, tensor in self.tensors().items() if name != "starts_n"}
        count = len(pieces["tokens_bt"])
        names = -(-len(self.samples) // count) if count else 0
        return [
            Batch(
                **{name: chunks[part] for name, chunks in pieces.items()},  # type: ignore[arg-type]
                # With context parallelism documents and `starts_n` are those of the whole row.
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
        """Document starts within a part; documents outside of it become empty ones at its ends."""
        if self.starts_n is None:
            return None
        before = sum(tokens.numel() for tokens in tokens_bt[:part])
        return (self.starts_n - before).clamp(0, tokens_bt[part].numel())
