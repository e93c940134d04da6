"""GELU (tanh approximation, GPT-2's); only its input is saved for the backward pass.

Takes fp32, bf16 and fp16; computes in fp32 and rounds once. A non-contiguous input is copied first. Deterministic.
"""

from __future__ import annotations

from torch import Tensor

from rush.kernels.elementwise import elementwise
from rush.kernels.support import FLOATS, require, require_device

__all__ = ["gelu"]

_gelu = elementwise("gelu", "x")


def gelu(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))), element by element."""
    require_device("gelu", x, has_cpu=True)
    require(x.dtype in FLOATS, "gelu takes fp32, bf16 and fp16; convert other dtypes first.")
    out: Tensor = _gelu(x)
    return out
