"""The LM head and its loss in plain torch, all logits at once: the reference for tests, in any dtype."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import linear

from rush.kernels.cross_entropy.reference import cross_entropy

# Shapes: n tokens, d hidden, v vocabulary.


def linear_cross_entropy(
    hidden_nd: Tensor, weight_vd: Tensor, labels_n: Tensor, *, ignore_index: int = -100
) -> Tensor:
    """The summed loss of logits = hidden · weightᵀ."""
    logits_nv = linear(hidden_nd, weight_vd)
    return cross_entropy(logits_nv, labels_n, ignore_index=ignore_index).sum()
