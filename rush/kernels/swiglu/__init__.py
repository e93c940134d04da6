# mypy: allow-untyped-decorators
"""SwiGLU: silu(gate) · up; only its inputs are saved for the backward pass.

Takes fp32, bf16 and fp16, both inputs in one dtype; computes in fp32 and rounds once. Non-contiguous inputs are copied
first. Deterministic.
"""

from __future__ import annotations

from torch import Tensor

from rush.kernels import cpu
from rush.kernels.support import FLOATS, op, register_elementwise, require, require_device, uses_cpp

__all__ = ["swiglu"]


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


@op("swiglu")
def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    if uses_cpp(gate):
        return cpu.swiglu_forward(gate, up)
    from rush.kernels.swiglu import triton as kernels

    return kernels.forward(gate, up)


@op("swiglu_backward")
def _swiglu_backward(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    if uses_cpp(gate):
        return cpu.swiglu_backward(dout, gate, up)
    from rush.kernels.swiglu import triton as kernels

    return kernels.backward(dout, gate, up)


register_elementwise(_swiglu, _swiglu_backward)
