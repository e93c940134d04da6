"""The loss of a chunk of logits whose vocabulary is sharded over ranks.

A row's loss and gradient need two numbers from the other shards: the logsumexp and the label's logit. Each rank computes
its own (the kernel of `cross_entropy`, without gradient), one all-gather shares them for the tokens of the chunk, and
with the global logsumexp every rank overwrites its logits with their gradient. No rank holds a row of the whole
vocabulary, and 8 bytes per token and rank are sent.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rush.kernels.cross_entropy import passes

# Shapes: c tokens of a chunk, w tokens of this vocab shard, r ranks.

ELSEWHERE, IGNORED = -1, -2
"""Placeholders for labels that are not in this shard."""


class VocabShard(NamedTuple):
    """This rank's shard of a vocabulary: its first token, and the process group of all shards."""

    first: int
    vocab_size: int
    """Tokens of all shards."""
    ranks: int
    group: str
    """The name of the process group."""


def sharded_losses(
    shard: VocabShard, logits_cw: Tensor, labels_c: Tensor, ignore_index: int, gradient_scale: float | None
) -> Tensor:
    """The losses over the whole vocabulary; with a scale, the logits are overwritten with their gradient times it."""
    own_c = labels_c - shard.first
    ignored_c = labels_c == ignore_index
    here_c = (own_c >= 0) & (own_c < logits_cw.shape[1]) & ~ignored_c
    own_c = torch.where(here_c, own_c, ELSEWHERE).masked_fill(ignored_c, IGNORED)
    lse_c = logits_cw.new_empty(len(labels_c), dtype=torch.float32)
    # Only the logsumexp is used: where a label is in another shard, the kernel's loss is NaN.
    passes.forward(
        logits_cw, own_c, torch.empty_like(lse_c), lse_c, num_columns=logits_cw.shape[1], ignore_index=IGNORED
    )
    label_logits_c = logits_cw.gather(1, own_c.clamp_min(0)[:, None].long())[:, 0].float()
    own_2c = torch.stack((lse_c, torch.where(here_c, label_logits_c, 0.0)))
    all_r2c = _all_gather(own_2c, shard)
    lse_c, label_logits_c = torch.logsumexp(all_r2c[:, 0], 0), all_r2c[:, 1].sum(0)
    known_c = (labels_c >= 0) & (labels_c < shard.vocab_size)
    losses_c = torch.where(known_c, lse_c - label_logits_c, torch.nan).masked_fill(ignored_c, 0.0)
    if gradient_scale is not None:
        passes.backward(
            logits_cw,
            own_c,
            lse_c,
            lse_c.new_full((1,), gradient_scale).expand(len(labels_c)),
            logits_cw,
            ignore_index=IGNORED,
        )
    return losses_c


def _all_gather(own: Tensor, shard: VocabShard) -> Tensor:
    """[rank, ...]."""
    collectives = torch.ops._c10d_functional
    flat = collectives.all_gather_into_tensor(own, shard.ranks, shard.group)
    found: Tensor = collectives.wait_tensor(flat).view(shard.ranks, *own.shape)
    return found
