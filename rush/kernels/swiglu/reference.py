"""SwiGLU in plain torch: the definition the kernel is held against, in any dtype, float64 included."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """One half of the wide layer, through SiLU, gates the other half."""
    return F.silu(gate) * up
