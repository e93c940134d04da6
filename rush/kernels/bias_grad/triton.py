# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Gradients that are written and summed over all rows in one pass.

The gradient of a bias is the sum over rows of its layer's gradient. A separate kernel would read that tensor once more.
Here the kernel that computes it sums it too: a program owns a strip of columns and a range of rows, writes its elements
and accumulates them in registers, in fp32 and before rounding. A small kernel adds the partial sums in a fixed order:
deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rush.kernels.gelu.triton import gelu_derivative
from rush.kernels.partials import sum_partials
from rush.kernels.support import as_rows

# Shapes: n rows, d columns of a split, o columns of the layer.

ROWS, COLUMNS = 32, 128
"""A tile: with 8 warps two 16-byte vectors per thread in bf16."""
MIN_ROWS, MAX_ROWS = 256, 512
"""Rows per program: enough that its partial sum costs little, few enough to fill every SM."""
PROGRAMS = 1024
"""The least number of programs, given enough rows: a few per SM of today's largest GPUs."""
NUM_WARPS = 8
STAGES = 3
"""Tiles in flight (software pipelining)."""


@triton.jit
def gelu_bias_grad_backward_kernel(
    dout_ptr,
    x_ptr,
    dx_ptr,
    partial_ptr,
    num_rows,
    width,
    PROGRAM_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = tl.arange(0, ROWS)[:, None]
    group = tl.program_id(1)
    left = tl.minimum(num_rows - group * PROGRAM_ROWS, PROGRAM_ROWS)
    # A 64-bit offset to the first row, 32-bit offsets inside.
    corner = group.to(tl.int64) * PROGRAM_ROWS * width
    dout_ptr += corner
    x_ptr += corner
    dx_ptr += corner
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, left, ROWS, num_stages=STAGES):
        inside = (row < left - start) & (column < width)
        place = start * width + (row * width + column)
        dout = tl.load(dout_ptr + place, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        dx = dout * gelu_derivative(x)
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        sums += dx
    column_sums = tl.sum(sums, axis=0, keep_dims=True)
    tl.store(partial_ptr + group.to(tl.int64) * width + column, column_sums, mask=column < width)


@triton.jit
def concat_bias_grad_kernel(
    first_ptr,
    second_ptr,
    third_ptr,
    out_ptr,
    partial_ptr,
    first_stride,
    second_stride,
    third_stride,
    num_rows,
    width,
    PROGRAM_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = tl.arange(0, ROWS)[:, None]
    group = tl.program_id(1)
    part = tl.program_id(2)
    left = tl.minimum(num_rows - group * PROGRAM_ROWS, PROGRAM_ROWS)
    whole = width * 3
    if part == 0:
        part_ptr, stride = first_ptr, first_stride
    elif part == 1:
        part_ptr, stride = second_ptr, second_stride
    else:
        part_ptr, stride = third_ptr, third_stride
    first_row = group.to(tl.int64) * PROGRAM_ROWS
    part_ptr += first_row * stride
    out_ptr += first_row * whole + part * width
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, left, ROWS, num_stages=STAGES):
        inside = (row < left - start) & (column < width)
        part_place = part_ptr + start * stride + (row * stride + column)
        x = tl.load(part_place, mask=inside, other=0.0)
        tl.store(out_ptr + start * whole + (row * whole + column), x, mask=inside)
        sums += x.to(tl.float32)
    column_sums = tl.sum(sums, axis=0, keep_dims=True)
    place = group.to(tl.int64) * whole + part * width + column
    tl.store(partial_ptr + place, column_sums, mask=column < width)


def gelu_bias_grad_backward(dout: Tensor, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradient of GELU's input, and its sum over all rows in `dtype`."""
    dout, x = dout.contiguous(), x.contiguous()
    width = x.shape[-1]
    num_rows = x.numel() // width
    rows = program_rows(num_rows, triton.cdiv(width, COLUMNS))
    dx, partial_pso = torch.empty_like(x), _partials(x, triton.cdiv(num_rows, rows), width)
    if num_rows:
        grid = (triton.cdiv(width, COLUMNS), len(partial_pso))
        gelu_bias_grad_backward_kernel[grid](
            dout,
            x,
            dx,
            partial_pso,
            num_rows,
            width,
            PROGRAM_ROWS=rows,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            STAGES=STAGES,
            num_warps=NUM_WARPS,
        )
    return dx, sum_partials(partial_pso, dtype)[0]


def concat_bias_grad(parts: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Three tensors of one shape concatenated along their last dim, and the sum of that over all rows in `dtype`."""
    first_nd, second_nd, third_nd = (as_rows(part) for part in parts)
    num_rows, width = first_nd.shape
    out = first_nd.new_empty(*parts[0].shape[:-1], 3 * width)
    rows = program_rows(num_rows, 3 * triton.cdiv(width, COLUMNS))
    partial_pso = _partials(out, triton.cdiv(num_rows, rows), 3 * width)
    if num_rows:
        grid = (triton.cdiv(width, COLUMNS), len(partial_pso), 3)
        concat_bias_grad_kernel[grid](
            first_nd,
            second_nd,
            third_nd,
            out,
            partial_pso,
            first_nd.stride(0),
            second_nd.stride(0),
            third_nd.stride(0),
            num_rows,
            width,
            PROGRAM_ROWS=rows,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            STAGES=STAGES,
            num_warps=NUM_WARPS,
        )
    return out, sum_partials(partial_pso, dtype)[0]


def program_rows(num_rows: int, strips: int) -> int:
    """Rows per program, a power of two, given the number of column strips."""
    rows = num_rows * strips // PROGRAMS
    return min(MAX_ROWS, max(MIN_ROWS, 1 << max(rows, 1).bit_length() - 1))


def _partials(x: Tensor, count: int, width: int) -> Tensor:
    return x.new_empty(count, 1, width, dtype=torch.float32)
