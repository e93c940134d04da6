"""One row among several ranks: who holds which positions, and attention over all of them.

A row is cut into chunks of equal length. Dealt out in order, the last rank would have the most work under a causal
mask: its queries see every key. So each rank gets one chunk from the head and its mirror from the tail, and all see
equally many. Every operation but attention works on each position alone and does not notice.

Here attention gathers the keys and values of all ranks (Llama 3's way: Grattafiori et al. 2024, arXiv:2407.21783,
section 3.3.2), puts them into the order of the row and asks the model's own core, once for each chunk of queries, which
it tells where the chunk stands. `rush.parallel.ring_attention` lets keys and values go round instead.

Shapes: b rows, h query heads, k key/value heads, t own positions, s all positions of the row, n of a chunk, d head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class SequenceSplit:
    """How the positions of a row are divided among ranks."""

    ranks: int
    rank: int
    balanced: bool = True
    """Whether a rank holds a chunk of the head and its mirror in the tail, instead of one chunk."""

    @property
    def num_chunks(self) -> int:
        """A row must be a multiple of so many positions."""
        return 2 * self.ranks if self.balanced else self.ranks

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """The numbers of a rank's chunks, in the order of the row."""
        return (rank, 2 * self.ranks - 1 - rank) if self.balanced else (rank,)

    @property
    def own(self) -> tuple[int, ...]:
        return self.chunks_of(self.rank)

    def take(self, row: Tensor, dim: int = 1) -> Tensor:
        """This rank's positions of a whole row."""
        chunks = row.chunk(self.num_chunks, dim)
        return torch.cat([chunks[chunk] for chunk in self.own], dim)

    def in_order(self, parts: Tensor, dim: int) -> Tensor:
        """The whole row from the parts of all ranks, [rank, ...]; `dim` counts without the ranks."""
        found = {
            chunk: piece
            for rank in range(self.ranks)
            for chunk, piece in zip(self.chunks_of(rank), parts[rank].chunk(len(self.own), dim), strict=True)
        }
        return torch.cat([found[chunk] for chunk in range(self.num_chunks)], dim)

    def pairs(self, rank: int, length: int) -> int:
        """How many pairs of query and key a rank attends to in a row of this length."""
        size = length // self.num_chunks
        return sum(chunk * size * size + size * (size + 1) // 2 for chunk in self.chunks_of(rank))


def all_gather(own: Tensor, ranks: int, group: str) -> Tensor:
    """The tensors of all ranks, [rank, ...]; in the backward pass each gets the sum of its gradients on all."""
    collectives = torch.ops._c10d_functional
    flat = collectives.all_gather_into_tensor(own.contiguous(), ranks, group)
    parts: Tensor = collectives.wait_tensor(flat).unflatten(0, (ranks, own.shape[0]))
    return parts


class AllGatherAttention(nn.Module):
    """The attention core `inner` over the whole row, for the queries of this rank.

    `inner` must know `query_offset`: its queries are the last positions of the keys that it is given.
    """

    def __init__(self, inner: nn.Module, split: SequenceSplit, group: str) -> None:
        super().__init__()
        self.inner, self.split, self.group = inner, split, group

    def forward(
        self,
        q_bhtd: Tensor,
        k_bktd: Tensor,
        v_bktd: Tensor,
        *,
        documents: Any = None,
        query_offset: int = 0,
    ) -> Tensor:
        assert query_offset == 0, "decoding with a cache uses the plain core"
        both = all_gather(torch.stack((k_bktd, v_bktd)), self.split.ranks, self.group)
        k_bksd, v_bksd = self.split.in_order(both, 3)
        outputs = []
        for place, q_bhnd in enumerate(q_bhtd.chunk(len(self.split.own), 2)):
            size = q_bhnd.shape[2]
            begin = self.split.own[place] * size
            outputs.append(
                self.inner(
                    q_bhnd,
                    k_bksd[:, :, : begin + size],
                    v_bksd[:, :, : begin + size],
                    documents=None if documents is None else documents[place],
                    query_offset=begin,
                )
            )
        return torch.cat(outputs, 2)


class ChunkDocuments(nn.Module):
    """Packed documents for each chunk of queries: in the form that the core wants, up to the chunk's end."""

    def __init__(self, inner: nn.Module, split: SequenceSplit) -> None:
        super().__init__()
        self.inner, self.split = inner, split

    def forward(self, documents_bs: Tensor, starts_n: Tensor | None) -> tuple[Any, ...]:
        length = documents_bs.shape[1]
        forms = []
        for chunk in self.split.own:
            end = (chunk + 1) * (length // self.split.num_chunks)
            starts = None
            if starts_n is not None:
                # The beginnings in a flattened batch of rows that end here; documents behind the end become empty.
                starts = starts_n // length * end + (starts_n % length).clamp(max=end)
            forms.append(self.inner(documents_bs[:, :end], starts))
        return tuple(forms)
