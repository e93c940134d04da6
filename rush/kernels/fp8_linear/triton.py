# mypy: allow-untyped-decorators
"""Cast to fp8 in both layouts at once.

Hopper's fp8 matmuls need both operands contiguous along the inner dim. A linear layer multiplies each operand along two
different dims (dout by rows for dx, by columns for dweight), so each is needed row-major and transposed. Here a program
reads a tile once, scales, rounds, and writes it twice, the second time transposed on chip, so that both writes are
coalesced. The scale, one per tensor, is computed before by plain operators that torch.compile fuses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
"""Rows and columns of a tile: 128 bytes of fp8 in either direction, a full cache line."""
NUM_WARPS = 8


@triton.jit
def fp8_cast_transpose_kernel(
    x_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    same_scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    transposed_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    row_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = (tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[:, None]
    column = (tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < num_rows) & (column < num_columns)
    x = tl.load(x_ptr + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    cast = (x * tl.load(scale_ptr)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * num_columns + column, cast, mask=inside)
    # Cast again, with a scale that ptxas cannot know to be the same: see fp8_mlp/triton.py.
    transposed = (x * tl.load(same_scale_ptr)).to(transposed_ptr.dtype.element_ty)
    tl.store(transposed_ptr + column * num_rows + row, transposed, mask=inside)


def cast_transpose(x_mk: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x · scale in fp8, and its transpose, each contiguous."""
    x_mk = x_mk if x_mk.stride(-1) == 1 else x_mk.contiguous()
    num_rows, num_columns = x_mk.shape
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=x_mk.device)
    transposed = torch.empty(num_columns, num_rows, dtype=dtype, device=x_mk.device)
    grid = (triton.cdiv(num_rows, BLOCK), triton.cdiv(num_columns, BLOCK))
    fp8_cast_transpose_kernel[grid](
        x_mk,
        scale,
        scale,
        out,
        transposed,
        num_rows,
        num_columns,
        x_mk.stride(0),
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return out, transposed
