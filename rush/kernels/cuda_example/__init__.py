"""An example of a kernel in C++ and CUDA: the squared ReLU, forward and backward.

For nearly all kernels Triton is shorter. This folder shows the alternative: sources are built on first use
(`building.py`) and register torch operators in C++; Python adds fake implementations and the backward formula. The CPU
kernel needs a C++ compiler, the GPU kernel nvcc too. `docs/custom-kernels.md` explains both.
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
    """Load the extension, building it if it is not cached, and register it: once per process. Returns its path."""
    global _library
    if _library is None:
        sources = [_FOLDER / "squared_relu.cpp"]
        if cannot_build_cuda() is None:
            sources.append(_FOLDER / "squared_relu.cu")
        _library = build("rush_squared_relu", sources, [_FOLDER / "squared_relu.h"])
        _register()
    return _library


def _register() -> None:
    """Fake implementations for torch.compile, and the backward formula for autograd."""
    torch.library.register_fake("rush::squared_relu", _like)
    torch.library.register_fake("rush::squared_relu_backward", lambda grad, x: _like(x))
    torch.library.register_autograd("rush::squared_relu", _gradient, setup_context=_setup_context)


def _like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    dx: Tensor = torch.ops.rush.squared_relu_backward(grad, x)
    return dx
