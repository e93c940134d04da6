"""How a kernel in C++ and CUDA is added: the squared ReLU, forward and backward.

For nearly all kernels Triton is the shorter way. This folder shows the other one, for what Triton cannot say: the
source is compiled on the spot (`building.py`), registers operators of torch in C++, and Python adds what the
compiler and autograd need to know. The CPU's part is built wherever a C++ compiler is, the GPU's where nvcc is too.
`docs/custom-kernels.md` walks through both ways.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rush.kernels.building import build, cannot_build, cannot_build_cuda
from rush.kernels.support import require

__all__ = ["cannot_build", "cannot_build_cuda", "load", "squared_relu"]

_FOLDER = Path(__file__).parent
_library: Path | None = None


def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)², differentiable, for floating-point tensors on the CPU or a CUDA device. The result is contiguous.

    The first call builds the extension (half a minute); in compiled code call `load` before.
    """
    require(x.is_floating_point(), f"squared_relu takes floating-point tensors; found {x.dtype}.")
    require(
        x.device.type in ("cpu", "cuda"),
        f"squared_relu runs on the CPU or a CUDA device; found {x.device.type}.",
    )
    if _library is None:
        require(
            not torch.compiler.is_compiling(), "squared_relu is not built yet: call load() before compiling."
        )
        load()
    out: Tensor = torch.ops.rush.squared_relu(x)
    return out


def load() -> Path:
    """Build the extension or take it from the cache, and register it: once in a process. The library's path."""
    global _library
    if _library is None:
        sources = [_FOLDER / "squared_relu.cpp"]
        if cannot_build_cuda() is None:
            sources.append(_FOLDER / "squared_relu.cu")
        _library = build("rush_squared_relu", sources, [_FOLDER / "squared_relu.h"])
        _tell_torch()
    return _library


def _tell_torch() -> None:
    """What C++ did not say: shapes without data, for the compiler; and the gradient, for autograd."""
    torch.library.register_fake("rush::squared_relu", _like)
    torch.library.register_fake("rush::squared_relu_backward", lambda grad, x: _like(x))
    torch.library.register_autograd("rush::squared_relu", _gradient, setup_context=_setup_context)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    down: Tensor = torch.ops.rush.squared_relu_backward(grad, x)
    return down
