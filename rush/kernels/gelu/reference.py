"""GELU in its tanh form, in plain torch: the definition the kernel is held against, float64 included."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³)))."""
    return F.gelu(x, approximate="tanh")
