# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Gradients that are written and summed over all rows in one walk.

The gradient of a bias is the sum over rows of its layer's gradient. As a kernel of its own that is one more read of a
tensor as wide as the layer. Here the kernel that makes the layer's gradient has every element at hand: a program owns a
strip of columns and a stretch of rows, writes its elements and keeps their sum in registers, in fp32 and before they are
rounded. A small sum over programs ends it, in a fixed order: the same bits every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rush.kernels.gelu.triton import gelu_slope
from rush.kernels.partials import sum_partials
from rush.kernels.support import as_rows

# Shapes: n rows, d columns of a part, o columns of the layer.

ROWS, COLUMNS = 32, 128
"""A tile: with 8 warps two vectors of 16 bytes a thread in bf16."""
LEAST_STRETCH, MOST_STRETCH = 256, 512
"""Rows of a program: enough that its sum is small change, and no more than leave work for every multiprocessor."""
PROGRAMS = 1024
"""At least so many where there are rows enough: a few for each multiprocessor of today's largest GPUs."""
NUM_WARPS = 8
STAGES = 3
"""Tiles on their way from memory while one is worked on."""


@triton.jit
def gelu_bias_grad_backward_kernel(
    dout_ptr,
    x_ptr,
    dx_ptr,
    partial_ptr,
    num_rows,
    width,
    STRETCH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = tl.arange(0, ROWS)[:, None]
    stretch = tl.program_id(1)
    left = tl.minimum(num_rows - stretch * STRETCH, STRETCH)
    # One step of 64 bits to the stretch; inside it 32 bits are enough.
    corner = stretch.to(tl.int64) * STRETCH * width
    dout_ptr += corner
    x_ptr += corner
    dx_ptr += corner
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, left, ROWS, num_stages=STAGES):
        inside = (row < left - start) & (column < width)
        place = start * width + (row * width + column)
        dout = tl.load(dout_ptr + place, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        dx = dout * gelu_slope(x)
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        total += dx
    sums = tl.sum(total, axis=0, keep_dims=True)
    tl.store(partial_ptr + stretch.to(tl.int64) * width + column, sums, mask=column < width)


@triton.jit
def concat_bias_grad_kernel(
    first_ptr,
    second_ptr,
    third_ptr,
    joined_ptr,
    partial_ptr,
    first_stride,
    second_stride,
    third_stride,
    num_rows,
    width,
    STRETCH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    row = tl.arange(0, ROWS)[:, None]
    stretch = tl.program_id(1)
    part = tl.program_id(2)
    left = tl.minimum(num_rows - stretch * STRETCH, STRETCH)
    whole = width * 3
    if part == 0:
        part_ptr, stride = first_ptr, first_stride
    elif part == 1:
        part_ptr, stride = second_ptr, second_stride
    else:
        part_ptr, stride = third_ptr, third_stride
    first_row = stretch.to(tl.int64) * STRETCH
    part_ptr += first_row * stride
    joined_ptr += first_row * whole + part * width
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in tl.range(0, left, ROWS, num_stages=STAGES):
        inside = (row < left - start) & (column < width)
        part_place = part_ptr + start * stride + (row * stride + column)
        x = tl.load(part_place, mask=inside, other=0.0)
        tl.store(joined_ptr + start * whole + (row * whole + column), x, mask=inside)
        total += x.to(tl.float32)
    sums = tl.sum(total, axis=0, keep_dims=True)
    place = stretch.to(tl.int64) * whole + part * width + column
    tl.store(partial_ptr + place, sums, mask=column < width)


def gelu_bias_grad_backward(dout: Tensor, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradient of GELU's input, and its sum over all rows in `dtype`."""
    dout, x = dout.contiguous(), x.contiguous()
    width = x.shape[-1]
    num_rows = x.numel() // width
    rows = stretch(num_rows, triton.cdiv(width, COLUMNS))
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
            STRETCH=rows,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            STAGES=STAGES,
            num_warps=NUM_WARPS,
        )
    return dx, sum_partials(partial_pso, dtype)[0]


def joined(parts: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Three tensors of one shape side by side along their last dim, and the sum of that over all rows in `dtype`."""
    first_nd, second_nd, third_nd = (as_rows(part) for part in parts)
    num_rows, width = first_nd.shape
    out = first_nd.new_empty(*parts[0].shape[:-1], 3 * width)
    rows = stretch(num_rows, 3 * triton.cdiv(width, COLUMNS))
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
            STRETCH=rows,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            STAGES=STAGES,
            num_warps=NUM_WARPS,
        )
    return out, sum_partials(partial_pso, dtype)[0]


def stretch(num_rows: int, strips: int) -> int:
    """Rows of a program, a power of two, where so many strips of columns lie side by side."""
    rows = num_rows * strips // PROGRAMS
    return min(MOST_STRETCH, max(LEAST_STRETCH, 1 << max(rows, 1).bit_length() - 1))


def _partials(x: Tensor, stretches: int, width: int) -> Tensor:
    """A sum for each stretch of rows."""
    return x.new_empty(stretches, 1, width, dtype=torch.float32)
