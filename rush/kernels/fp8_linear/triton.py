# mypy: allow-untyped-decorators
"""Cast to fp8 in both layouts at once.

The 8-bit matmuls of Hopper want both factors with the inner dim side by side in memory. A linear layer
multiplies each of its factors along two different dims (the gradient once by rows for dx, once by columns
for dweight), so each is needed as it is and transposed. Done one after the other that is two reads of the
wide tensor; here a program reads a tile once, multiplies by the scale, rounds, and writes it twice, the
second time turned over on chip so that both writes go out in whole lines. The scale is known before: one
number for the tensor, made by plain operators that a compiler fuses with what came before.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 128
"""Rows and columns of a tile: in either direction 128 bytes of fp8, a whole line of memory."""
NUM_WARPS = 8


@triton.jit
def fp8_cast_both_kernel(
    x_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    same_scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    turned_ptr: tl.tensor,
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
    # Cast once more, with a scale that the assembler cannot know to be the same: fp8_mlp's kernels say why.
    turned = (x * tl.load(same_scale_ptr)).to(turned_ptr.dtype.element_ty)
    tl.store(turned_ptr + column * num_rows + row, turned, mask=inside)


def cast_both(x_mk: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x · scale in fp8, and its transpose, each contiguous."""
    x_mk = x_mk if x_mk.stride(-1) == 1 else x_mk.contiguous()
    num_rows, num_columns = x_mk.shape
    out = torch.empty(num_rows, num_columns, dtype=dtype, device=x_mk.device)
    turned = torch.empty(num_columns, num_rows, dtype=dtype, device=x_mk.device)
    grid = (triton.cdiv(num_rows, BLOCK), triton.cdiv(num_columns, BLOCK))
    fp8_cast_both_kernel[grid](
        x_mk,
        scale,
        scale,
        out,
        turned,
        num_rows,
        num_columns,
        x_mk.stride(0),
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    return out, turned
