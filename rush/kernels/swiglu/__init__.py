# mypy: allow-untyped-decorators
"""SwiGLU: silu(gate) · up; only its inputs are saved for the backward pass.

Takes fp32, bf16 and fp16, both inputs in one dtype; computes in fp32 and rounds once. Non-contiguous inputs are copied
first. Deterministic.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rush.kernels import cpu
from rush.kernels.support import FLOATS, op, require, require_device, uses_cpp

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


def _like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@_swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return _like(gate)


@_swiglu_backward.register_fake
def _(dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return _like(gate), _like(up)


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor] = _swiglu_backward(dout, *ctx.saved_tensors)
    return gradients


_swiglu.register_autograd(_gradients, setup_context=_setup_context)
