"""Linear layers whose three matrix products (forward, and both gradients) have fp16 factors, on ARM CPUs.

A CPU with fp16 arithmetic does eight multiply-adds in the instruction that does four in fp32, so a product may take half
the time. torch has no such product there (its own fp16 one is many times slower than fp32). Inputs and results are
fp32: factors are cast on the way in, blocks of 64 by 128 values with a scale each, so that neither large nor small
numbers leave fp16's range; sums over 128 products are made in fp16, sums of those in fp32. What it costs is precision (results
are off by some two thousandths of their size, as with bf16 factors) and the casts, which read every factor once. The bias
is added in the same kernel, and its gradient made in the one that reads the gradient anyway.

On two Neoverse-N1 cores the products of a small GPT-2 (2048 tokens, widths of 128 to 2048) run at 103 to 126 GFLOP/s, casts
included, where torch's fp32 ones run at 52 to 72. The kernel is C++ with ARM's vector instructions, compiled on the spot (ten
seconds, once) and kept in the cache.
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
# OpenMP for torch's parallel loops; its library is not linked but found among torch's own, or threads would be made twice.
_FLAGS = ("-O3", "-march=armv8.2-a+fp16", "-fopenmp")
_HARDWARE_CAPABILITIES, _FP16_VECTORS = 16, 1 << 10  # AT_HWCAP and HWCAP_ASIMDHP of Linux on ARM
_library: Path | None = None

# Shapes: m tokens, n outputs, k inputs.


def fp16_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias in fp32, by products with fp16 factors forward and backward.

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
            f"fp16_linear takes fp32 and makes the fp16 factors itself; found {tensor.dtype}.",
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


def lacks_units() -> str | None:
    """Why this CPU has no products of fp16 vectors; None if it has."""
    if platform.machine() not in ("aarch64", "arm64"):
        return f"it needs an ARM CPU, and this is {platform.machine()}"
    if sys.platform != "linux":
        return f"it needs Linux, and this is {sys.platform}"
    if not ctypes.CDLL(None).getauxval(_HARDWARE_CAPABILITIES) & _FP16_VECTORS:
        return "this ARM CPU has no fp16 arithmetic (asimdhp)"
    return None


def cannot_run() -> str | None:
    """Why the kernel cannot run here; None if it can, though it may have to be built first."""
    return lacks_units() or (None if is_built() else cannot_build())


def is_built() -> bool:
    """Whether the kernel lies in the cache, so that loading it takes no time."""
    return library_of(_NAME, _SOURCES, _HEADERS, _FLAGS).is_file()


def load() -> Path:
    """Build the kernel or take it from the cache, and register it: once in a process. The library's path."""
    global _library
    if _library is None:
        reason = cannot_run()
        require(reason is None, f"fp16_linear cannot run here: {reason}.")
        _library = build(_NAME, _SOURCES, _HEADERS, _FLAGS)
        _tell_torch()
    return _library


def _tell_torch() -> None:
    """What C++ did not say: shapes without data, for the compiler; and the gradient, for autograd."""
    torch.library.register_fake("rush::fp16_matmul", lambda left, right, bias: _shaped(left, right))
    torch.library.register_fake(
        "rush::fp16_matmul_with_row_sums",
        lambda left, right: (_shaped(left, right), left.new_empty(left.shape[0])),
    )
    torch.library.register_autograd("rush::fp16_matmul", _gradients, setup_context=_keep)


def _shaped(left_mk: Tensor, right_kn: Tensor) -> Tensor:
    return left_mk.new_empty(left_mk.shape[0], right_kn.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
    left, right, _ = inputs
    ctx.save_for_backward(left, right)


def _gradients(ctx: Any, dout_mn: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of the right factor turned over, as the weight lies: dWᵀ = (doutᵀ · x)ᵀ. Its rows' sums are the gradient of the bias."""
    left_mk, right_kn = ctx.saved_tensors
    dleft = dright = dbias = None
    if ctx.needs_input_grad[0]:
        dleft = torch.ops.rush.fp16_matmul(dout_mn, right_kn.t(), None)
    if ctx.needs_input_grad[1] and ctx.needs_input_grad[2]:
        turned, dbias = torch.ops.rush.fp16_matmul_with_row_sums(dout_mn.t(), left_mk)
        dright = turned.t()
    elif ctx.needs_input_grad[1]:
        dright = torch.ops.rush.fp16_matmul(dout_mn.t(), left_mk, None).t()
    elif ctx.needs_input_grad[2]:
        dbias = dout_mn.sum(0)
    return dleft, dright, dbias
