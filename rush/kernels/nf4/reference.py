"""NF4 dequantization in plain torch: the reference for the kernel's tests, float64 included."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK, SCALE_BLOCK = 64, 256
"""Weights per scale, and scales per second-level scale."""

# Dettmers et al. 2023 (arXiv:2305.14314), appendix E.
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


def dequantize_nf4(
    codes: Tensor,
    scales: Tensor,
    scale_scales: Tensor,
    scale_table: Tensor,
    offset: Tensor,
    dims: tuple[int, int],
    dtype: torch.dtype,
) -> Tensor:
    """value[code] · (table[scale] · scale of the scale + offset), the high half of a byte before its low half.

    Computed in the dtype of the tables, each step rounded, and rounded once more as it is written.
    """
    values = torch.tensor(VALUES, dtype=scale_table.dtype, device=codes.device)
    pairs = torch.stack((codes >> 4, codes & 15), dim=-1).long()
    of_scales = scale_scales.repeat_interleave(SCALE_BLOCK)[: scales.numel()]
    largest = scale_table[scales.long()] * of_scales + offset
    weight = values[pairs].view(-1, BLOCK) * largest[:, None]
    return weight.to(dtype).view(dims)
