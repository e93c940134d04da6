# mypy: allow-untyped-decorators
"""Rotary positions: queries and keys turned in one launch, in the layout the linear layers leave them in.

Takes fp32, bf16 and fp16 queries and keys with fp32 angles; the turn is done in fp32 and rounded once. No
gradient goes to the angles. Under autocast it sees what the linear layers give, and keeps that dtype.
Bitwise repeatable.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rush.kernels.rope import triton as kernels
from rush.kernels.support import op, require, require_device

__all__ = ["rope"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MAX_ELEMENTS = 32768
"""Of all heads of a token, which one program holds on chip."""

# Shapes: b batch, h query heads, k key heads, t positions, d head dim.


def rope(q_bhtd: Tensor, k_bktd: Tensor, cos_btd: Tensor, sin_btd: Tensor) -> tuple[Tensor, Tensor]:
    """Turn each pair (i, i + d/2) of every query and key by its position's angle.

    Cosines and sines are given for the full head dim, the second half repeating the first, for each row or once for
    all (a batch of 1).
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
        "rope needs queries and keys of as many positions and one even head dim.",
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
        f"rope holds all heads of a token on chip: at most {MAX_ELEMENTS} elements.",
    )
    turned: tuple[Tensor, Tensor] = _rope(q_bhtd, k_bktd, cos_btd, sin_btd)
    return turned


@op("rope")
def _rope(q_bhtd: Tensor, k_bktd: Tensor, cos_btd: Tensor, sin_btd: Tensor) -> tuple[Tensor, Tensor]:
    return kernels.turn(q_bhtd, k_bktd, cos_btd, sin_btd, back=False)


@op("rope_backward")
def _rope_backward(
    dq_bhtd: Tensor, dk_bktd: Tensor, cos_btd: Tensor, sin_btd: Tensor
) -> tuple[Tensor, Tensor]:
    return kernels.turn(dq_bhtd, dk_bktd, cos_btd, sin_btd, back=True)


@_rope.register_fake
def _(q_bhtd: Tensor, k_bktd: Tensor, cos_btd: Tensor, sin_btd: Tensor) -> tuple[Tensor, Tensor]:
    return kernels.side_by_side(q_bhtd), kernels.side_by_side(k_bktd)


@_rope_backward.register_fake
def _(dq_bhtd: Tensor, dk_bktd: Tensor, cos_btd: Tensor, sin_btd: Tensor) -> tuple[Tensor, Tensor]:
    return kernels.side_by_side(dq_bhtd), kernels.side_by_side(dk_bktd)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    _, _, cos_btd, sin_btd = inputs
    ctx.save_for_backward(cos_btd, sin_btd)


def _gradients(ctx: Any, dq_bhtd: Tensor, dk_bktd: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk = _rope_backward(dq_bhtd, dk_bktd, *ctx.saved_tensors)
    return dq, dk, None, None


_rope.register_autograd(_gradients, setup_context=_keep)
