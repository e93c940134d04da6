"""Context parallelism: sequences sharded over ranks, with attention that all-gathers keys and values.

A row is split into chunks of equal length. Assigned in order, the last rank would have the most work under a causal mask: its
queries see every key. So each rank gets one chunk from the head and its mirror from the tail. Only attention looks across
positions.

Attention here all-gathers the keys and values of all ranks (as Llama 3: Grattafiori et al. 2024, arXiv:2407.21783, section
3.3.2), restores the order of the row and calls the model's attention core once per chunk of queries, with the chunk's offset.
`rush.parallel.ring_attention` passes keys and values around instead.

Shapes: b rows, h query heads, k key/value heads, t own positions, s all positions of the row, n of a chunk, d head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class SequenceSplit:
    """How the positions of a row are sharded over ranks."""

    ranks: int
    rank: int
    balanced: bool = True
    """Whether a rank holds a chunk of the head and its mirror in the tail, or one chunk."""

    @property
    def num_chunks(self) -> int:
        """The length of a row must be a multiple of this."""
        return 2 * self.ranks if self.balanced else self.ranks

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """The indices of a rank's chunks, in the order of the row."""
        return (rank, 2 * self.ranks - 1 - rank) if self.balanced else (rank,)

    @property
    def own(self) -> tuple[int, ...]:
        return self.chunks_of(self.rank)

    def take(self, row: Tensor, dim: int = 1) -> Tensor:
        """This rank's positions of a full row."""
        chunks = row.chunk(self.num_chunks, dim)
        return torch.cat([chunks[chunk] for chunk in self.own], dim)

    def in_order(self, shards: Tensor, dim: int) -> Tensor:
        """The full row from the shards of all ranks, [rank, ...]; `dim` counts without the ranks."""
        found = {
            chunk: piece
            for rank in range(self.ranks)
            for chunk, piece in zip(self.chunks_of(rank), shards[rank].chunk(len(self.own), dim), strict=True)
        }
        return torch.cat([found[chunk] for chunk in range(self.num_chunks)], dim)

    def pairs(self, rank: int, length: int) -> int:
        """The number of (query, key) pairs of a rank in a row of this length."""
        size = length // self.num_chunks
        return sum(chunk * size * size + size * (size + 1) // 2 for chunk in self.chunks_of(rank))


def all_gather(own: Tensor, ranks: int, group: str) -> Tensor:
    """The tensors of all ranks, [rank, ...]; the backward pass reduce-scatters the gradients."""
    collectives = torch.ops._c10d_functional
    flat = collectives.all_gather_into_tensor(own.contiguous(), ranks, group)
    gathered: Tensor = collectives.wait_tensor(flat).unflatten(0, (ranks, own.shape[0]))
    return gathered


class AllGatherAttention(nn.Module):
    """The attention core `inner` over the full row, for the queries of this rank.

    `inner` must support `query_offset`: its queries are the last positions of its keys.
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
    """Packed documents for each chunk of queries, in the core's form, up to the chunk's end."""

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
                # Starts in a flattened batch of rows that end here; documents behind the end become empty.
                starts = starts_n // length * end + (starts_n % length).clamp(max=end)
            forms.append(self.inner(documents_bs[:, :end], starts))
        return tuple(forms)
