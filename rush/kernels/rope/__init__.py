# mypy: allow-untyped-decorators
"""Rotary position embeddings (RoPE): queries and keys rotated in one launch, in the layout of the linear layers.

Takes fp32, bf16 and fp16 queries and keys with fp32 cosines and sines; rotates in fp32 and rounds once. The angles get
no gradient. Deterministic.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rush.kernels.rope import triton as kernels
from rush.kernels.support import FLOATS, empty_bthd, op, require, require_device

__all__ = ["rope"]

MAX_ELEMENTS = 32768
"""Elements of all heads of a token: one program keeps them in registers."""

# Shapes: b batch, h query heads, k key heads, t positions, d head dim.


def rope(q_bhtd: Tensor, k_bktd: Tensor, cos_btd: Tensor, sin_btd: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate each pair (i, i + d/2) of every query and key by its position's angle.

    Cosines and sines have the full head dim, the second half repeating the first, and a batch of b or 1.
    """
    require_device("rope", q_bhtd, k_bktd, cos_btd, sin_btd)
    require(
        q_bhtd.dtype in FLOATS and k_bktd.dtype == q_bhtd.dtype,
        "rope takes queries and keys in one dtype: fp32, bf16 or fp16.",
    )
    require(
        q_bhtd.dim() == 4 and k_bktd.dim() == 4 and q_bhtd.shape[0] == k_bktd.shape[0],
        "rope takes queries and keys as [batch, heads, positions, head dim] of one batch.",
    )
    require(
        q_bhtd.shape[2:] == k_bktd.shape[2:] and q_bhtd.shape[-1] % 2 == 0,
        "rope needs queries and keys with equal positions and one even head dim.",
    )
    require(
        cos_btd.shape == sin_btd.shape
        and cos_btd.dim() == 3
        and cos_btd.shape[1:] == q_bhtd.shape[2:]
        and cos_btd.shape[0] in (1, q_bhtd.shape[0]),
        "rope needs cosines and sines of [batch or 1, positions, head dim].",
    )
    require(
        q_bhtd.shape[1] * q_bhtd.shape[3] <= MAX_ELEMENTS
        and k_bktd.shape[1] * k_bktd.shape[3] <= MAX_ELEMENTS,
        f"rope keeps all heads of a token in registers: at most {MAX_ELEMENTS} elements.",
    )
    rotated: tuple[Tensor, Tensor] = _rope(q_bhtd, k_bktd, cos_btd, sin_btd)
    return rotated


@op("rope")
def _rope(q_bhtd: Tensor, k_bktd: Tensor, cos_btd: Tensor, sin_btd: Tensor) -> tuple[Tensor, Tensor]:
    return kernels.rotate(q_bhtd, k_bktd, cos_btd, sin_btd, inverse=False)


@op("rope_backward")
def _rope_backward(
    dq_bhtd: Tensor, dk_bktd: Tensor, cos_btd: Tensor, sin_btd: Tensor
) -> tuple[Tensor, Tensor]:
    return kernels.rotate(dq_bhtd, dk_bktd, cos_btd, sin_btd, inverse=True)


@_rope.register_fake
def _(q_bhtd: Tensor, k_bktd: Tensor, cos_btd: Tensor, sin_btd: Tensor) -> tuple[Tensor, Tensor]:
    return empty_bthd(q_bhtd), empty_bthd(k_bktd)


@_rope_backward.register_fake
def _(dq_bhtd: Tensor, dk_bktd: Tensor, cos_btd: Tensor, sin_btd: Tensor) -> tuple[Tensor, Tensor]:
    return empty_bthd(dq_bhtd), empty_bthd(dk_bktd)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos_btd, sin_btd = inputs
    ctx.save_for_backward(cos_btd, sin_btd)


def _gradients(ctx: Any, dq_bhtd: Tensor, dk_bktd: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk = _rope_backward(dq_bhtd, dk_bktd, *ctx.saved_tensors)
    return dq, dk, None, None


_rope.register_autograd(_gradients, setup_context=_setup_context)
