# mypy: allow-untyped-decorators
"""GELU (tanh approximation, GPT-2's); only its input is saved for the backward pass.

Takes fp32, bf16 and fp16; computes in fp32 and rounds once. A non-contiguous input is copied first. Deterministic.
"""

from __future__ import annotations

from torch import Tensor

from rush.kernels import cpu
from rush.kernels.support import FLOATS, op, register_elementwise, require, require_device, uses_cpp

__all__ = ["gelu"]


def gelu(x: Tensor) -> Tensor:
    """x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))), element by element."""
    require_device("gelu", x, has_cpu=True)
    require(x.dtype in FLOATS, "gelu takes fp32, bf16 and fp16; convert other dtypes first.")
    out: Tensor = _gelu(x)
    return out


@op("gelu")
def _gelu(x: Tensor) -> Tensor:
    if uses_cpp(x):
        return cpu.gelu_forward(x)
    from rush.kernels.gelu import triton as kernels

    return kernels.forward(x)


@op("gelu_backward")
def _gelu_backward(dout: Tensor, x: Tensor) -> Tensor:
    if uses_cpp(x):
        return cpu.gelu_backward(dout, x)
    from rush.kernels.gelu import triton as kernels

    return kernels.backward(dout, x)


register_elementwise(_gelu, _gelu_backward)
