"""Ring attention: keys and values are sent around the ranks, and each rank accumulates the output of its queries.

A block of keys gives a softmax-weighted mean of its values and its log-sum-exp; two such results merge exactly, weighted by
their sums of exponentials (Liu et al. 2023, arXiv:2310.01889). The next block is sent while one is computed. The backward pass
sends keys and values around again, with their gradients, which arrive complete at their owner.

Blocks are pairs of chunks of one length: a chunk of queries sees all of an earlier chunk of keys, nothing of a later one, and
its own causally. So any kernel that returns its log-sum-exp works. A pass is one operator to the compiler: ranks compute
different blocks, but all must send in the same order.

Shapes: b rows, h query heads, k key/value heads, t own positions, n of a chunk, m of another, s of the row, d head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rush.parallel.attention_blocks import KERNELS
from rush.parallel.context_parallel import SequenceSplit

KEYS, GRADIENTS = 0, 1
"""Message tags."""


class RingBlocks:
    """The blocks of one rank's queries; no communication here."""

    def __init__(self, split: SequenceSplit, kernel: str, documents_bs: Tensor | None) -> None:
        self.split, self.kernel, self.documents_bs = split, KERNELS[kernel], documents_bs

    def _visible_chunks(self, source: int) -> Iterator[tuple[int, int, bool, Tensor | None]]:
        """Pairs of a query chunk here and a key chunk of `source` that it sees; its own keys come first."""
        for mine, query in enumerate(self.split.own):
            for theirs, key in reversed(list(enumerate(self.split.chunks_of(source)))):
                if key <= query:
                    yield mine, theirs, key == query, self._visible(query, key)

    def _visible(self, query: int, key: int) -> Tensor | None:
        if self.documents_bs is None:
            return None
        chunks = self.documents_bs.chunk(self.split.num_chunks, 1)
        return chunks[query][:, :, None] == chunks[key][:, None, :]

    def _chunks(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(len(self.split.own), 2)

    def forward(self, q: Tensor, kv: Tensor, source: int, found: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Merge the attention to the keys and values of `source` into each query chunk's result."""
        qs, (ks, vs) = self._chunks(q), map(self._chunks, kv)
        for mine, theirs, causal, visible in self._visible_chunks(source):
            o, lse = self.kernel.forward(
                *(x.contiguous() for x in (qs[mine], ks[theirs], vs[theirs])), causal, visible
            )
            found[mine] = (o.float(), lse) if mine not in found else merge(*found[mine], o, lse)

    def backward(
        self, do: Tensor, q: Tensor, kv: Tensor, o: Tensor, lse: Tensor, source: int, dq: Tensor
    ) -> Tensor:
        """The fp32 gradient of the keys and values of `source`; that of the queries is added to dq."""
        dos, qs, os, lses, (ks, vs) = *map(self._chunks, (do, q, o, lse)), map(self._chunks, kv)
        dqs, dkv = self._chunks(dq), torch.zeros_like(kv, dtype=torch.float32)
        dks, dvs = map(self._chunks, dkv)
        for mine, theirs, causal, visible in self._visible_chunks(source):
            given = dos[mine], qs[mine], ks[theirs], vs[theirs], os[mine], lses[mine]
            parts = self.kernel.backward(*(x.contiguous() for x in given), causal, visible)
            for total, part in zip((dqs[mine], dks[theirs], dvs[theirs]), parts, strict=True):
                total.add_(part)
        return dkv


def merge(o: Tensor, lse: Tensor, new_o: Tensor, new_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two results, in fp32; the first has seen at least one key."""
    both = torch.logaddexp(lse, new_lse)
    return o * torch.exp(lse - both)[..., None] + new_o * torch.exp(new_lse - both)[..., None], both


def _send_recv(group: Any, sent: Tensor, tag: int) -> Callable[[], Tensor]:
    """Send to the next rank and receive from the previous one; call the result to wait for what is received."""
    ranks, place, device = dist.get_process_group_ranks(group), dist.get_rank(group), sent.device
    if dist.get_backend(group) == "gloo":
        sent = sent.cpu()  # ranks that share a GPU: gloo sends from host memory
    sent, received = sent.contiguous(), torch.empty_like(sent, memory_format=torch.contiguous_format)
    ahead, behind = ranks[(place + 1) % len(ranks)], ranks[place - 1]
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, ahead, group, tag),
            dist.P2POp(dist.irecv, received, behind, group, tag),
        ]
    )

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return received.to(device)

    return wait


def _resolve(group: str) -> Any:
    return torch.distributed.distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]


@torch.library.custom_op("rush::ring_attention_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, kernel: str, group: str, balanced: bool
) -> tuple[Tensor, Tensor]:
    ring = _resolve(group)
    split = SequenceSplit(dist.get_world_size(ring), dist.get_rank(ring), balanced)
    blocks, kv = RingBlocks(split, kernel, documents), torch.stack((k, v))
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for hop in range(split.ranks):
        coming = _send_recv(ring, kv, KEYS) if hop < split.ranks - 1 else None
        blocks.forward(q, kv, (split.rank - hop) % split.ranks, found)
        kv = kv if coming is None else coming()
    parts = [found[place] for place in range(len(split.own))]
    return torch.cat([o for o, _ in parts], 2).to(q.dtype), torch.cat([lse for _, lse in parts], 2)


@torch.library.custom_op("rush::ring_attention_backward", mutates_args=())
def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    o: Tensor,
    lse: Tensor,
    kernel: str,
    group: str,
    balanced: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    ring = _resolve(group)
    split = SequenceSplit(dist.get_world_size(ring), dist.get_rank(ring), balanced)
    blocks, kv = RingBlocks(split, kernel, documents), torch.stack((k, v))
    dq = torch.zeros_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
    previous: Callable[[], Tensor] | None = None
    for hop in range(split.ranks):
        coming = _send_recv(ring, kv, KEYS) if hop < split.ranks - 1 else None
        dkv = blocks.backward(do, q, kv, o, lse, (split.rank - hop) % split.ranks, dq)
        if previous is not None:
            dkv += previous()
        previous = _send_recv(ring, dkv, GRADIENTS)
        kv = kv if coming is None else coming()
    assert previous is not None
    dk, dv = previous().to(k.dtype)
    return dq.to(q.dtype), dk.clone(), dv.clone()


@_forward.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@_backward.register_fake
def _(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, documents, *output)


def _autograd_backward(ctx: Any, do: Tensor, _: Tensor) -> tuple[Any, ...]:
    return *_backward(do, *ctx.saved_tensors, *ctx.rest), None, None, None, None


_forward.register_autograd(_autograd_backward, setup_context=_setup_context)


def ring_attention(
    q_bhtd: Tensor,
    k_bktd: Tensor,
    v_bktd: Tensor,
    *,
    documents_bs: Tensor | None,
    kernel: str,
    group: str,
    balanced: bool,
) -> Tensor:
    """Attention of this rank's queries to the keys of the full row. All ranks of the group must call it.

    `documents_bs` gives the document of each position of the full row: a query sees only its own document.
    """
    o_bhtd: Tensor = _forward(q_bhtd, k_bktd, v_bktd, documents_bs, kernel, group, balanced)[0]
    return o_bhtd
