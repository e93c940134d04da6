"""Linear layers whose three matmuls (forward, and both gradients) have fp16 operands, on ARM CPUs.

A CPU with fp16 arithmetic does eight multiply-adds in the instruction that does four in fp32, so a matmul may take half
the time. torch's own fp16 matmul there is many times slower than fp32. Inputs and results are fp32: operands are cast in
blocks of 64 by 128 values with one scale each, so that nothing overflows or underflows; 128 terms are accumulated in
fp16, those sums in fp32. The cost is precision (a relative error of 0.2 %, as with bf16 operands) and the casts, which
read every operand once. The bias is added in the same kernel, and its gradient summed where dout is read anyway.

On two Neoverse-N1 cores the matmuls of a small GPT-2 (2048 tokens, widths of 128 to 2048) run at 103 to 126 GFLOP/s,
casts included, torch's fp32 ones at 52 to 72. The kernel is C++ with NEON intrinsics, built on first use and cached.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rush.kernels.building import build, cannot_build, library_of
from rush.kernels.support import require

__all__ = ["cannot_build", "cannot_run", "fp16_linear", "is_built", "load"]

_FOLDER = Path(__file__).parent
_NAME = "rush_fp16_matmul"
_SOURCES, _HEADERS = (_FOLDER / "fp16_matmul.cpp",), (_FOLDER / "fp16_matmul.h",)
# OpenMP for at::parallel_for; linked through torch, not directly, so that there is one thread pool.
_FLAGS = ("-O3", "-march=armv8.2-a+fp16", "-fopenmp")
_HARDWARE_CAPABILITIES, _FP16_VECTORS = 16, 1 << 10  # AT_HWCAP and HWCAP_ASIMDHP of Linux on ARM
_library: Path | None = None

# Shapes: m tokens, n outputs, k inputs.


def fp16_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias in fp32, with fp16 matmuls forward and backward.

    The first call builds the kernel (ten seconds); in compiled code call `load` before.
    """
    tensors = (x, weight) if bias is None else (x, weight, bias)
    for tensor in tensors:
        require(
            tensor.device.type in ("cpu", "meta"),
            f"fp16_linear runs on the CPU; found {tensor.device.type}. Move the tensors, or use torch's own linear.",
        )
        require(
            tensor.dtype == torch.float32,
            f"fp16_linear takes fp32 and casts to fp16 itself; found {tensor.dtype}.",
        )
    require(
        weight.dim() == 2 and x.dim() >= 1 and x.shape[-1] == weight.shape[1],
        "fp16_linear needs an input of [..., inputs] and a weight of [outputs, inputs].",
    )
    require(bias is None or bias.shape == weight.shape[:1], "fp16_linear needs a bias of [outputs].")
    if _library is None:
        require(
            not torch.compiler.is_compiling(), "fp16_linear is not built yet: call load() before compiling."
        )
        load()
    x_mk = x.reshape(-1, x.shape[-1])
    out_mn: Tensor = torch.ops.rush.fp16_matmul(x_mk, weight.t(), bias)
    return out_mn.reshape(*x.shape[:-1], weight.shape[0])


def lacks_fp16_arithmetic() -> str | None:
    """Why this CPU has no fp16 vector arithmetic; None if it has."""
    if platform.machine() not in ("aarch64", "arm64"):
        return f"it needs an ARM CPU, and this is {platform.machine()}"
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if not ctypes.CDLL(None).getauxval(_HARDWARE_CAPABILITIES) & _FP16_VECTORS:
        return "this ARM CPU has no fp16 arithmetic (asimdhp)"
    return None


def cannot_run() -> str | None:
    """Why the kernel cannot run here; None if it can, perhaps after a build."""
    return lacks_fp16_arithmetic() or (None if is_built() else cannot_build())


def is_built() -> bool:
    """Whether the built library is in the cache."""
    return library_of(_NAME, _SOURCES, _HEADERS, _FLAGS).is_file()


def load() -> Path:
    """Load the library, building it if it is not cached, and register it: once per process. Returns its path."""
    global _library
    if _library is None:
        reason = cannot_run()
        require(reason is None, f"fp16_linear cannot run here: {reason}.")
        _library = build(_NAME, _SOURCES, _HEADERS, _FLAGS)
        _register()
    return _library


def _register() -> None:
    """Fake implementations for torch.compile, and the backward formula for autograd."""
    torch.library.register_fake("rush::fp16_matmul", lambda left, right, bias: _shaped(left, right))
    torch.library.register_fake(
        "rush::fp16_matmul_with_row_sums",
        lambda left, right: (_shaped(left, right), left.new_empty(left.shape[0])),
    )
    torch.library.register_autograd("rush::fp16_matmul", _gradients, setup_context=_setup_context)


def _shaped(left_mk: Tensor, right_kn: Tensor) -> Tensor:
    return left_mk.new_empty(left_mk.shape[0], right_kn.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    left, right, _ = inputs
    ctx.save_for_backward(left, right)


def _gradients(ctx: Any, dout_mn: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dright is computed transposed, in the weight's layout: dWᵀ = (doutᵀ · x)ᵀ. Its row sums are the bias gradient."""
    left_mk, right_kn = ctx.saved_tensors
    dleft = dright = dbias = None
    if ctx.needs_input_grad[0]:
        dleft = torch.ops.rush.fp16_matmul(dout_mn, right_kn.t(), None)
    if ctx.needs_input_grad[1] and ctx.needs_input_grad[2]:
        dright_t, dbias = torch.ops.rush.fp16_matmul_with_row_sums(dout_mn.t(), left_mk)
        dright = dright_t.t()
    elif ctx.needs_input_grad[1]:
        dright = torch.ops.rush.fp16_matmul(dout_mn.t(), left_mk, None).t()
    elif ctx.needs_input_grad[2]:
        dbias = dout_mn.sum(0)
    return dleft, dright, dbias
