"""The loss of a chunk of logits of which every rank has some of the words.

What a row's loss and gradient need of the words elsewhere are two numbers: the log of the softmax's denominator and the
label's logit. Each rank walks over its own columns (the kernel of `cross_entropy`, without gradient), the ranks tell each
other these two numbers for each token of the chunk, and with the denominator of all words every rank writes the gradient
over its own logits. So nobody ever has a row of all words, and eight bytes a token and rank are all that is sent.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rush.kernels.cross_entropy import passes

# Shapes: c tokens of a chunk, w words of this rank, r ranks.

ELSEWHERE, IGNORED = -1, -2
"""In the place of labels that are no words of this rank."""


class Words(NamedTuple):
    """Which words of a vocabulary this process has, and how it reaches those that have the others."""

    first: int
    whole: int
    """Words of all ranks."""
    ranks: int
    group: str
    """The name of the process group."""


def losses_among(
    words: Words, logits_cw: Tensor, labels_c: Tensor, ignore_index: int, gradient_scale: float | None
) -> Tensor:
    """The losses over all words; with a scale, what these words' logits have as gradient times it takes their place."""
    own_c = labels_c - words.first
    ignored_c = labels_c == ignore_index
    here_c = (own_c >= 0) & (own_c < logits_cw.shape[1]) & ~ignored_c
    own_c = torch.where(here_c, own_c, ELSEWHERE).masked_fill(ignored_c, IGNORED)
    lse_c = logits_cw.new_empty(len(labels_c), dtype=torch.float32)
    # A label that is elsewhere is no word of this rank, so the kernel's own losses say nothing.
    passes.forward(
        logits_cw,
        own_c,
        torch.empty_like(lse_c),
        lse_c,
        num_columns=logits_cw.shape[1],
        ignore_index=IGNORED,
        label_smoothing=0.0,
        z_loss=0.0,
    )
    label_logits_c = logits_cw.gather(1, own_c.clamp_min(0)[:, None].long())[:, 0].float()
    told_2c = torch.stack((lse_c, torch.where(here_c, label_logits_c, 0.0)))
    all_r2c = _from_all(told_2c, words)
    lse_c, label_logits_c = torch.logsumexp(all_r2c[:, 0], 0), all_r2c[:, 1].sum(0)
    known_c = (labels_c >= 0) & (labels_c < words.whole)
    losses_c = torch.where(known_c, lse_c - label_logits_c, torch.nan).masked_fill(ignored_c, 0.0)
    if gradient_scale is not None:
        passes.backward(
            logits_cw,
            own_c,
            lse_c,
            lse_c.new_full((1,), gradient_scale).expand(len(labels_c)),
            logits_cw,
            ignore_index=IGNORED,
            label_smoothing=0.0,
            z_loss=0.0,
        )
    return losses_c


def _from_all(told: Tensor, words: Words) -> Tensor:
    """What every rank tells, [rank, ...]."""
    collectives = torch.ops._c10d_functional
    flat = collectives.all_gather_into_tensor(told, words.ranks, words.group)
    found: Tensor = collectives.wait_tensor(flat).view(words.ranks, *told.shape)
    return found
