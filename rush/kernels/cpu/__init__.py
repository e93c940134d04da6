"""C++ kernels for a CPU: GELU, SwiGLU, cross-entropy and attention, forward and backward, in fp32.

torch's CPU operators are fast in matmuls and slow around them: on two Neoverse-N1 cores, in a 377 ms step of the `tiny`
recipe, GELU and its gradient take 39 ms, torch's flash attention 63, log-softmax 26. These kernels are vectorized
throughout: exponentials by polynomial, no avoidable pass over memory, small matmuls with tiles in registers. One source
for ARM and x86, by the compiler's vector extensions; built on first use (half a minute) and cached.

Each kernel's own folder has the public function, which calls these for CPU tensors; 16-bit inputs are converted.
"""

from __future__ import annotations

import platform
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rush.errors import MachineError
from rush.kernels.building import build, cannot_build, library_of
from rush.kernels.support import empty_bthd

_FOLDER = Path(__file__).parent
_NAME = "rush_cpu"
_SOURCES = (_FOLDER / "operators.cpp",)
_HEADERS = tuple(
    _FOLDER / name for name in ("vectors.h", "activations.h", "softmax_loss.h", "matmul.h", "attention.h")
)
_ARM, _X86 = ("aarch64", "arm64"), ("x86_64", "AMD64")
_loaded = False


def cannot_run() -> str | None:
    """Why these kernels cannot run here; None if they can, perhaps after a build."""
    if sys.platform != "linux":
        return f"they need Linux, and this is {sys.platform}"
    if platform.machine() not in (*_ARM, *_X86):
        return f"they need ARM or x86, and this is {platform.machine()}"
    reason = cannot_build()
    return reason if reason and not is_built() else None


def is_built() -> bool:
    """Whether the built library is in the cache."""
    return library_of(_NAME, _SOURCES, _HEADERS, _flags()).is_file()


def load() -> None:
    """Load the library, building it if it is not cached: once per process."""
    global _loaded
    if not _loaded:
        if reason := cannot_run():
            raise MachineError(f"The C++ kernels for a CPU cannot run here: {reason}.")
        build(_NAME, _SOURCES, _HEADERS, _flags())
        _loaded = True


@cache
def _flags() -> tuple[str, ...]:
    """OpenMP for at::parallel_for (linked through torch), and the vector extensions of this CPU."""
    wide = ("-mavx2", "-mfma") if platform.machine() in _X86 and _has_avx2() else ()
    return ("-O3", "-fopenmp", *wide)


def _has_avx2() -> bool:
    return (
        "AVX2" in torch.backends.cpu.get_cpu_capability()
        or "AVX512" in torch.backends.cpu.get_cpu_capability()
    )


def _ops() -> Any:
    load()
    return torch.ops.rush_cpu


def elementwise(name: str, *tensors: Tensor) -> Any:
    """An operator of `elementwise.py`, forward or backward: in fp32, rounded to the dtype of the last tensor."""
    found, dtype = getattr(_ops(), name)(*(x.float().contiguous() for x in tensors)), tensors[-1].dtype
    return found.to(dtype) if isinstance(found, Tensor) else tuple(x.to(dtype) for x in found)


def cross_entropy_forward(
    logits_nv: Tensor,
    labels_n: Tensor,
    losses_n: Tensor,
    lse_n: Tensor | None,
    num_columns: int,
    ignore_index: int,
    gradient_scale: float,
) -> None:
    """See `cross_entropy.passes.forward`."""
    wide_nv = logits_nv.float()
    settings = (num_columns, ignore_index, gradient_scale)
    _ops().cross_entropy_forward(wide_nv, labels_n.long(), losses_n, lse_n, *settings)
    if lse_n is None and wide_nv is not logits_nv:
        logits_nv.copy_(wide_nv)


def cross_entropy_backward(
    logits_nv: Tensor, labels_n: Tensor, lse_n: Tensor, upstream_n: Tensor, out_nv: Tensor, ignore_index: int
) -> None:
    wide_nv = out_nv if out_nv.dtype == torch.float32 else torch.empty_like(out_nv, dtype=torch.float32)
    _ops().cross_entropy_backward(
        logits_nv.float(), labels_n.long(), lse_n, upstream_n.float(), wide_nv, ignore_index
    )
    if wide_nv is not out_nv:
        out_nv.copy_(wide_nv)


def attention_forward(
    q_bhtd: Tensor,
    k_bktd: Tensor,
    v_bktd: Tensor,
    first_bt: Tensor | None,
    last_bt: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The output, in memory layout [b, t, h, d], and the logsumexp to base 2."""
    o_bhtd = empty_bthd(q_bhtd, torch.float32)
    lse2_bht = q_bhtd.new_empty(q_bhtd.shape[:3], dtype=torch.float32)
    inputs = (_dense(x) for x in (q_bhtd, k_bktd, v_bktd))
    _ops().attention_forward(*inputs, first_bt, last_bt, causal, scale, o_bhtd, lse2_bht)
    return o_bhtd.to(q_bhtd.dtype), lse2_bht


def attention_backward(
    do_bhtd: Tensor,
    q_bhtd: Tensor,
    k_bktd: Tensor,
    v_bktd: Tensor,
    lse2_bht: Tensor,
    first_bt: Tensor | None,
    last_bt: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = [empty_bthd(x, torch.float32) for x in (q_bhtd, k_bktd, v_bktd)]
    inputs = (_dense(x) for x in (do_bhtd, q_bhtd, k_bktd, v_bktd))
    _ops().attention_backward(*inputs, lse2_bht, first_bt, last_bt, causal, scale, *gradients)
    dq, dk, dv = (gradient.to(q_bhtd.dtype) for gradient in gradients)
    return dq, dk, dv


def _dense(x_bhtd: Tensor) -> Tensor:
    """In fp32 with unit stride along the head dim."""
    wide = x_bhtd.float()
    return wide if wide.stride(-1) == 1 else wide.contiguous()
