"""The squared ReLU, max(x, 0)², in plain torch."""

from __future__ import annotations

from torch import Tensor


def squared_relu(x: Tensor) -> Tensor:
    return x.relu().square()
