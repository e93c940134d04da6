"""GeGLU, as Gemma has it: gelu(gate) · up with GELU's tanh approximation; only its inputs are saved for the backward pass.

Takes fp32, bf16 and fp16, both inputs in one dtype; computes in fp32 and rounds once. Non-contiguous inputs are copied
first. Deterministic.
"""

from __future__ import annotations

from torch import Tensor

from rush.kernels.elementwise import elementwise
from rush.kernels.support import FLOATS, require, require_device

__all__ = ["geglu"]

_geglu = elementwise("geglu", "gate", "up")


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) · up, element by element."""
    require_device("geglu", gate, up, has_cpu=True)
    require(
        gate.dtype in FLOATS and up.dtype == gate.dtype,
        "geglu takes gate and up in one dtype: fp32, bf16 or fp16.",
    )
    require(gate.shape == up.shape, "geglu takes gate and up of one shape.")
    out: Tensor = _geglu(gate, up)
    return out
