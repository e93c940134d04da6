"""Ring attention: keys and values go round, and each rank adds up what its queries find in them.

Of every softmax a rank sees one block of keys at a time. What a block gives is a mean of its values and the logarithm of
the sum of its exponentials; two such results make one, weighted by those sums, so the order does not matter and the
outcome is exact (Liu et al. 2023, arXiv:2310.01889). While a block is worked on, the next one travels. The backward
pass lets keys and values go round again, and their gradients with them, which come home full.

The blocks are pairs of chunks of one length: a chunk of queries sees all of an earlier chunk of keys, nothing of a later
one, and of its own what is not in the future. So any kernel that gives its sums of exponentials will do. A pass is one
operator to the compiler: which blocks a rank computes is its own affair, but all must send in the same order.

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
"""Tags: what is under way at the same time must not be mistaken for each other."""


class Blocks:
    """The blocks of one rank's queries, and what they make of keys and values that come by. No rank talks here."""

    def __init__(self, split: SequenceSplit, kernel: str, documents_bs: Tensor | None) -> None:
        self.split, self.kernel, self.documents_bs = split, KERNELS[kernel], documents_bs

    def _meeting(self, source: int) -> Iterator[tuple[int, int, bool, Tensor | None]]:
        """Places of chunks here and at `source` that see each other; a chunk's own keys come first."""
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

    def attend(self, q: Tensor, kv: Tensor, source: int, found: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Add to what each chunk of queries has found what it finds in the keys and values of `source`."""
        qs, (ks, vs) = self._chunks(q), map(self._chunks, kv)
        for mine, theirs, causal, visible in self._meeting(source):
            o, lse = self.kernel.forward(
                *(x.contiguous() for x in (qs[mine], ks[theirs], vs[theirs])), causal, visible
            )
            found[mine] = (o.float(), lse) if mine not in found else merged(*found[mine], o, lse)

    def gradients(
        self, do: Tensor, q: Tensor, kv: Tensor, o: Tensor, lse: Tensor, source: int, dq: Tensor
    ) -> Tensor:
        """The gradient of the keys and values of `source` by these queries, in fp32; that of the queries is added to dq."""
        dos, qs, os, lses, (ks, vs) = *map(self._chunks, (do, q, o, lse)), map(self._chunks, kv)
        dqs, dkv = self._chunks(dq), torch.zeros_like(kv, dtype=torch.float32)
        dks, dvs = map(self._chunks, dkv)
        for mine, theirs, causal, visible in self._meeting(source):
            given = dos[mine], qs[mine], ks[theirs], vs[theirs], os[mine], lses[mine]
            parts = self.kernel.backward(*(x.contiguous() for x in given), causal, visible)
            for total, part in zip((dqs[mine], dks[theirs], dvs[theirs]), parts, strict=True):
                total.add_(part)
        return dkv


def merged(o: Tensor, lse: Tensor, new_o: Tensor, new_lse: Tensor) -> tuple[Tensor, Tensor]:
    """One result of two, in fp32. The first has seen a key at least."""
    both = torch.logaddexp(lse, new_lse)
    return o * torch.exp(lse - both)[..., None] + new_o * torch.exp(new_lse - both)[..., None], both


def _pass_on(group: Any, sent: Tensor, tag: int) -> Callable[[], Tensor]:
    """Send to the next rank and receive from the one before; call the result to wait for what comes."""
    ranks, place, device = dist.get_process_group_ranks(group), dist.get_rank(group), sent.device
    if dist.get_backend(group) == "gloo":
        sent = sent.cpu()  # ranks that share a GPU: gloo passes on what is in host memory
    sent, coming = sent.contiguous(), torch.empty_like(sent, memory_format=torch.contiguous_format)
    ahead, behind = ranks[(place + 1) % len(ranks)], ranks[place - 1]
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, ahead, group, tag), dist.P2POp(dist.irecv, coming, behind, group, tag)]
    )

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return coming.to(device)

    return wait


def _resolve(group: str) -> Any:
    return torch.distributed.distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]


@torch.library.custom_op("rush::ring_attention_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, kernel: str, group: str, balanced: bool
) -> tuple[Tensor, Tensor]:
    ring = _resolve(group)
    split = SequenceSplit(dist.get_world_size(ring), dist.get_rank(ring), balanced)
    blocks, kv = Blocks(split, kernel, documents), torch.stack((k, v))
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for hop in range(split.ranks):
        coming = _pass_on(ring, kv, KEYS) if hop < split.ranks - 1 else None
        blocks.attend(q, kv, (split.rank - hop) % split.ranks, found)
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
    blocks, kv = Blocks(split, kernel, documents), torch.stack((k, v))
    dq = torch.zeros_like(q, dtype=torch.float32, memory_format=torch.contiguous_format)
    before: Callable[[], Tensor] | None = None
    for hop in range(split.ranks):
        coming = _pass_on(ring, kv, KEYS) if hop < split.ranks - 1 else None
        dkv = blocks.gradients(do, q, kv, o, lse, (split.rank - hop) % split.ranks, dq)
        if before is not None:
            dkv += before()
        before = _pass_on(ring, dkv, GRADIENTS)
        kv = kv if coming is None else coming()
    assert before is not None
    dk, dv = before().to(k.dtype)
    return dq.to(q.dtype), dk.clone(), dv.clone()


@_forward.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@_backward.register_fake
def _(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, *ctx.rest = inputs
    ctx.save_for_backward(q, k, v, documents, *output)


def _gradients(ctx: Any, do: Tensor, _: Tensor) -> tuple[Any, ...]:
    return *_backward(do, *ctx.saved_tensors, *ctx.rest), None, None, None, None


_forward.register_autograd(_gradients, setup_context=_keep)


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
    """Attention of this rank's queries to the keys of the whole row. All ranks of the group must call it.

    `documents_bs` numbers the document of each position of the whole row: a query sees its own document only.
    """
    o_bhtd: Tensor = _forward(q_bhtd, k_bktd, v_bktd, documents_bs, kernel, group, balanced)[0]
    return o_bhtd
