"""SwiGLU: silu(gate) · up; only its inputs are saved for the backward pass.

Takes fp32, bf16 and fp16, both inputs in one dtype; computes in fp32 and rounds once. Non-contiguous inputs are copied
first. Deterministic.
"""

from __future__ import annotations

from torch import Tensor

from rush.kernels.elementwise import elementwise
from rush.kernels.support import FLOATS, require, require_device

__all__ = ["swiglu"]

_swiglu = elementwise("swiglu", "gate", "up")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, element by element."""
    require_device("swiglu", gate, up, has_cpu=True)
    require(
        gate.dtype in FLOATS and up.dtype == gate.dtype,
        "swiglu takes gate and up in one dtype: fp32, bf16 or fp16.",
    )
    require(gate.shape == up.shape, "swiglu takes gate and up of one shape.")
    out: Tensor = _swiglu(gate, up)
    return out
