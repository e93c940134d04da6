"""Rotary positions in plain torch: the reference for the kernel's tests, in any dtype, float64 included."""

from __future__ import annotations

import torch
from torch import Tensor


def rope(q_bhtd: Tensor, k_bktd: Tensor, cos_btd: Tensor, sin_btd: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate each pair (i, i + d/2) of every query and key by its position's angle."""
    cos, sin = cos_btd[:, None], sin_btd[:, None]
    return _rotate(q_bhtd, cos, sin), _rotate(k_bktd, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat((first, second), dim=-1) * cos + torch.cat((-second, first), dim=-1) * sin
    return rotated.to(x.dtype)
