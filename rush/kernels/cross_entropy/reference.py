"""Cross-entropy in plain torch: the definition the kernel is held against, in any dtype, float64 included."""

from __future__ import annotations

import torch
from torch import Tensor

# Shapes: n rows, v classes (the vocabulary).


def cross_entropy(
    logits_nv: Tensor,
    labels_n: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """The loss of each row: −Σ q·log p, and z_loss · (log of the softmax's denominator)².

    The target q has 1 − label_smoothing on the label and the rest spread over all classes. Rows whose label is
    `ignore_index` cost nothing.
    """
    wide_nv = logits_nv if logits_nv.dtype == torch.float64 else logits_nv.float()
    lse_n = torch.logsumexp(wide_nv, dim=-1)
    ignored_n = labels_n == ignore_index
    label_logits_n = wide_nv.gather(-1, labels_n.masked_fill(ignored_n, 0)[:, None])[:, 0]
    losses_n = lse_n - (1 - label_smoothing) * label_logits_n + z_loss * lse_n.square()
    if label_smoothing:
        losses_n = losses_n - label_smoothing * wide_nv.mean(dim=-1)
    return losses_n.masked_fill(ignored_n, 0.0)
