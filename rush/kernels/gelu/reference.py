"""GELU (tanh approximation), in plain torch: the reference for the kernel's tests, float64 included."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")
