# mypy: allow-untyped-decorators
"""The last step of a sum over rows: partial sums are added and cast to their final dtype.

Kernels that sum over all rows (the gradients of a norm's weight and bias) keep one fp32 partial sum per program, without
atomics. This adds them in a fixed order and rounds once: deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rush.kernels.support import supports_pdl

PARTIALS, COLUMNS = 256, 16
"""Narrow, tall tiles spread the little work over many programs."""

# Shapes: p partial sums, s quantities, d width.


@triton.jit
def sum_partials_kernel(
    partial_ptr: tl.tensor,
    first_ptr: tl.tensor,
    second_ptr: tl.tensor,
    num_partials: tl.tensor,
    width: tl.tensor,
    QUANTITIES: tl.constexpr,
    PARTIALS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        tl.extra.cuda.gdc_wait()  # for the writes of the kernel before
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    quantity = tl.program_id(1)
    total = tl.zeros((PARTIALS, COLUMNS), tl.float32)
    for start in range(0, num_partials, PARTIALS):
        row = start + tl.arange(0, PARTIALS)[:, None]
        place = (row * QUANTITIES + quantity) * width + column
        total += tl.load(partial_ptr + place, mask=(row < num_partials) & (column < width), other=0.0)
    result = tl.sum(total, axis=0, keep_dims=True).to(first_ptr.dtype.element_ty)
    if quantity == 0:
        tl.store(first_ptr + column, result, mask=column < width)
    else:
        tl.store(second_ptr + column, result, mask=column < width)


def sum_partials(partial_psd: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The sums over the first dim of one or two quantities."""
    num_partials, quantities, width = partial_psd.shape
    assert quantities in (1, 2)
    sums = [torch.empty(width, dtype=dtype, device=partial_psd.device) for _ in range(quantities)]
    pdl = supports_pdl(partial_psd.device)
    sum_partials_kernel[(triton.cdiv(width, COLUMNS), quantities)](
        partial_psd,
        sums[0],
        sums[-1],
        num_partials,
        width,
        QUANTITIES=quantities,
        PARTIALS=PARTIALS,
        COLUMNS=COLUMNS,
        PDL=pdl,
        num_warps=4,
        **({"launch_pdl": True} if pdl else {}),
    )
    return sums
