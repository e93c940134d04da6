"""Attention by its definition, with the whole score matrix: the reference of the kernel.

Shapes: b batch, t and s positions, h query heads, k key/value heads, d head dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rush.kernels.flash_attention.documents import document_bounds


def attention(
    q_bhtd: Tensor,
    k_bksd: Tensor,
    v_bksd: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    documents: Tensor | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ) v over the keys each query may see, in the dtype it is given (float64 included)."""
    group = q_bhtd.shape[1] // k_bksd.shape[1]
    k_bhsd, v_bhsd = k_bksd.repeat_interleave(group, dim=1), v_bksd.repeat_interleave(group, dim=1)
    scale = q_bhtd.shape[-1] ** -0.5 if scale is None else scale
    scores_bhts = q_bhtd @ k_bhsd.transpose(-1, -2) * scale
    batch, _, length, _ = q_bhtd.shape
    position = torch.arange(length, device=q_bhtd.device)
    visible_bts = torch.ones(batch, length, length, dtype=torch.bool, device=q_bhtd.device)
    if causal:
        visible_bts = visible_bts & (position[None, :] <= position[:, None])
    if documents is not None:
        first_bt, last_bt = document_bounds(documents, batch, length)
        visible_bts = visible_bts & (position >= first_bt[:, :, None]) & (position < last_bt[:, :, None])
    scores_bhts = scores_bhts.masked_fill(~visible_bts[:, None], -math.inf)
    wide = torch.promote_types(scores_bhts.dtype, torch.float32)
    weights_bhts = torch.softmax(scores_bhts, dim=-1, dtype=wide).to(v_bhsd.dtype)
    return weights_bhts @ v_bhsd
