"""The squared ReLU as its definition says it."""

from __future__ import annotations

from torch import Tensor


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)², in the dtype it is given."""
    return x.relu().square()
