"""Elementwise operators that save their inputs: registration, dispatch and launch.

`<op>/triton.py` has `forward` of the inputs and `backward` of the output's gradient and the inputs; both compute in fp32 and
round once. On a CPU the C++ kernels of the same names run.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from rush.kernels import cpu
from rush.kernels.support import uses_cpp


def elementwise(name: str, *inputs: str) -> Any:
    """Register the differentiable operator `rush::<name>` of these inputs, and `rush::<name>_backward`."""

    def forward(*tensors: Tensor) -> Any:
        return _call(name, "forward", tensors)

    def backward(*tensors: Tensor) -> Any:
        return _call(name, "backward", tensors)

    def gradient_shapes(dout: Tensor, *tensors: Tensor) -> Any:
        found = tuple(x.new_empty(x.shape) for x in tensors)
        return found if len(found) > 1 else found[0]

    takes = ", ".join(f"Tensor {one}" for one in inputs)
    gives = ", ".join("Tensor" for _ in inputs)
    op = torch.library.custom_op(f"rush::{name}", forward, mutates_args=(), schema=f"({takes}) -> Tensor")
    backward_op = torch.library.custom_op(
        f"rush::{name}_backward",
        backward,
        mutates_args=(),
        schema=f"(Tensor dout, {takes}) -> {f'({gives})' if len(inputs) > 1 else gives}",
    )
    op.register_fake(lambda *tensors: tensors[0].new_empty(tensors[0].shape))
    backward_op.register_fake(gradient_shapes)
    op.register_autograd(
        lambda ctx, dout: backward_op(dout, *ctx.saved_tensors),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    return op


def _call(name: str, step: str, tensors: Sequence[Tensor]) -> Any:
    if uses_cpp(tensors[0]):
        return cpu.elementwise(f"{name}_{step}", *tensors)
    return getattr(import_module(f"rush.kernels.{name}.triton"), step)(*tensors)


def launch(kernel: Any, tensors: Sequence[Tensor], outputs: int, block: int, num_warps: int) -> list[Tensor]:
    """Call a Triton kernel that reads these tensors, all of one shape, and writes so many like the last."""
    tensors = [x.contiguous() for x in tensors]
    found = [torch.empty_like(tensors[-1]) for _ in range(outputs)]
    if size := tensors[-1].numel():
        kernel[(-(-size // block),)](*tensors, *found, size, BLOCK=block, num_warps=num_warps)
    return found
