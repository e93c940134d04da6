"""Cross-entropy in plain torch: the reference for the kernel's tests, in any dtype, float64 included."""

from __future__ import annotations

import torch
from torch import Tensor

# Shapes: n rows, v classes (the vocabulary).


def cross_entropy(logits_nv: Tensor, labels_n: Tensor, *, ignore_index: int = -100) -> Tensor:
    """The loss of each row; rows whose label is `ignore_index` cost nothing."""
    wide_nv = logits_nv if logits_nv.dtype == torch.float64 else logits_nv.float()
    ignored_n = labels_n == ignore_index
    label_logits_n = wide_nv.gather(-1, labels_n.masked_fill(ignored_n, 0)[:, None])[:, 0]
    return (torch.logsumexp(wide_nv, dim=-1) - label_logits_n).masked_fill(ignored_n, 0.0)
