"""Rotary positions in plain torch: the definition the kernel is held against, in any dtype, float64 included."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(q_bhtd: Tensor, k_bktd: Tensor, cos_btd: Tensor, sin_btd: Tensor) -> tuple[Tensor, Tensor]:
    """Turn each pair (i, i + d/2) of every query and key by its position's angle."""
    return _turn(q_bhtd, cos_btd[:, None], sin_btd[:, None]), _turn(
        k_bktd, cos_btd[:, None], sin_btd[:, None]
    )


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((first, second), dim=-1) * cos + torch.cat((-second, first), dim=-1) * sin
    return turned.to(x.dtype)
