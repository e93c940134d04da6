"""The 256 values of an 8-bit code: dynamic quantization, after Dettmers et al. 2021 (arXiv:2110.02861).

Moments span many orders of magnitude, so uniform quantization would round most of them to zero. Here each decade from
10⁻⁶ to 1 is divided into equal steps: one in the lowest, twice as many in each higher one (and twice that where no bit is
needed for the sign). A block is divided by its absmax, and each element is replaced by the nearest of the 256 values.
"""

from __future__ import annotations

import torch
from torch import Tensor

DECADES = 7


def dynamic_map(signed: bool) -> Tensor:
    """The values of the codes 0 to 255, ascending, in fp32 on the CPU: 0, 1 and the centers of the steps."""
    positive = []
    for decade in range(DECADES):
        steps = 2**decade if signed else 2 ** (decade + 1)
        top = 10.0 ** (decade - DECADES + 1)
        positive += [top * (0.1 + 0.9 * (step + 0.5) / steps) for step in range(steps)]
    negative = [-value for value in positive] if signed else []
    values = torch.tensor(sorted([*negative, 0.0, *positive, 1.0]), dtype=torch.float64)
    assert len(values) == 256
    return values.float()


def code_of_zero(signed: bool) -> int:
    return 127 if signed else 0
