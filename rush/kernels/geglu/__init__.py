# mypy: allow-untyped-decorators
"""GeGLU, as Gemma has it: gelu(gate) · up with GELU's tanh approximation; only its inputs are saved for the backward pass.

Takes fp32, bf16 and fp16, both inputs in one dtype; computes in fp32 and rounds once. Non-contiguous inputs are copied
first. Deterministic.
"""

from __future__ import annotations

from torch import Tensor

from rush.kernels import cpu
from rush.kernels.support import FLOATS, op, register_elementwise, require, require_device, uses_cpp

__all__ = ["geglu"]


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


@op("geglu")
def _geglu(gate: Tensor, up: Tensor) -> Tensor:
    if uses_cpp(gate):
        return cpu.geglu_forward(gate, up)
    from rush.kernels.geglu import triton as kernels

    return kernels.forward(gate, up)


@op("geglu_backward")
def _geglu_backward(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    if uses_cpp(gate):
        return cpu.geglu_backward(dout, gate, up)
    from rush.kernels.geglu import triton as kernels

    return kernels.backward(dout, gate, up)


register_elementwise(_geglu, _geglu_backward)
