"""Whole matrices of sharded tensors: each rank gets some of them, works on them, and gives the rows back.

A tensor sharded over ranks by rows is in pieces, and some computations need all of it at once. Gathering every tensor on every
rank would repeat the computation. Instead one all-to-all sends the pieces of matrix `k` to rank `k` modulo the number of ranks,
and a second one sends the rows of the result back: every rank computes its share, and each value travels twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rush.parallel.sharded import ShardedDim, is_sharded, sharded_dims

# Shapes: k matrices of a rank, s ranks, p rows of a piece, m rows and n columns of a matrix.


def row_shards(tensor: Tensor) -> ShardedDim | None:
    """How the rows of a matrix are sharded; None for one that this rank has whole."""
    dims = sharded_dims(tensor) if is_sharded(tensor) else []
    assert len(dims) <= 1, f"sharded over {len(dims)} axes"
    assert all(one.dim == 0 and one.parts == 1 for one in dims), f"no shard of rows: {dims}"
    return dims[0] if dims else None


def on_whole_matrices(
    compute: Callable[[Tensor], Tensor], pieces: Sequence[Tensor], like: Tensor
) -> list[Tensor]:
    """This rank's rows of `compute(matrices)`. `pieces` are this rank's rows of matrices of the shape of `like`, which is sharded as
    all of them are; `compute` takes and returns any number of matrices as one tensor `[k, m, n]`."""
    shards = row_shards(like)
    if shards is None:
        return list(compute(torch.stack(list(pieces))).unbind())
    target: Any = like
    group, ranks = target.device_mesh.get_group(shards.axis), shards.ranks
    height, width = like.shape
    rows, own = -(-height // ranks), pieces[0].shape[0]
    each = -(-len(pieces) // ranks)
    sent_kspn = pieces[0].new_zeros(each, ranks, rows, width)
    for number, piece in enumerate(pieces):
        sent_kspn[number // ranks, number % ranks, :own] = piece
    arrived_skpn = _all_to_all(sent_kspn.transpose(0, 1), group)
    mine = len(range(shards.index, len(pieces), ranks))
    whole_kmn = arrived_skpn.transpose(0, 1).reshape(each, ranks * rows, width)
    # A rank beyond the number of matrices has none to compute, and takes part in both collectives all the same.
    found_kmn = compute(whole_kmn[:mine, :height]) if mine else whole_kmn[:0, :height]
    back_kmn = found_kmn.new_zeros(each, ranks * rows, width)
    back_kmn[:mine, :height] = found_kmn
    home_skpn = _all_to_all(back_kmn.view(each, ranks, rows, width).transpose(0, 1), group)
    return [home_skpn[number % ranks, number // ranks, :own] for number in range(len(pieces))]


def _all_to_all(sent: Tensor, group: Any) -> Tensor:
    """Send `sent[r]` to rank r; returns what each rank sent here."""
    arrived = torch.empty_like(sent, memory_format=torch.contiguous_format)
    torch.distributed.all_to_all_single(arrived, sent.contiguous(), group=group)
    return arrived
