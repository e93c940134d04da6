"""Fingerprints of tensors: equal for equal values, on every device.

Integer sums modulo 2^64 do not depend on the order, so a checksum is the same on every device and in any chunks. Both detect
accidental differences, not forgeries.
"""

from __future__ import annotations

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor

_MULTIPLIERS = (0x9E3779B97F4A7C15 - 2**64, 0xC2B2AE3D27D4EB4F - 2**64)
_CHUNK = 1 << 20
_RUN = 32
"""Words of 8 bytes that are summed before positions are mixed in."""


@torch.no_grad()
def fingerprint(tensor: Tensor) -> str:
    """Two checksums of the words, weighted by position: about 0.2 GB/s per core."""
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    if rest := -flat.numel() % 4:
        flat = F.pad(flat, (0, rest))
    words = flat.view(torch.int32)
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _CHUNK):
        piece = words[start : start + _CHUNK].long()
        place = torch.arange(start + 1, start + 1 + piece.numel(), device=tensor.device)
        for number, multiplier in enumerate(_MULTIPLIERS):
            mixed = place * multiplier
            sums[number] += ((piece + place) * (mixed ^ (mixed >> 29))).sum()
    text = f"{tensor.dtype}{tuple(tensor.shape)}{sums.tolist()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@torch.no_grad()
def base_fingerprint(weight: Tensor) -> str:
    """The fingerprint of a base's weight rounded to bf16, whatever its dtype, at gigabytes per second.

    Runs of 256 bytes are summed, and the sums fingerprinted. A changed value is detected, and so is a moved row or run;
    values that swap places in steps of four within a run are not.
    """
    flat = weight.detach().to(torch.bfloat16).contiguous().flatten()
    words = F.pad(flat, (0, -flat.numel() % (4 * _RUN))).view(torch.int64)
    return f"{tuple(weight.shape)}{fingerprint(words.view(-1, _RUN).sum(1))}"
