"""GeGLU in plain torch: the reference for the kernel's tests, in any dtype, float64 included."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up
