# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""What the kernels of RMSNorm and LayerNorm share: how rows are read, and how kernels are launched over them.

Forward, a program keeps a few whole rows in registers. Backward, persistent programs walk over all rows, because the
gradients of weight and bias are sums over rows: each program writes a partial sum, and a small kernel adds those. No atomics,
so it is deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from rush.kernels.norm_ops import sum_dtype
from rush.kernels.partials import sum_partials
from rush.kernels.support import as_rows, persistent_rows, row_tile

# Shapes: n rows, d width.


@triton.jit
def load_input(
    x_ptr, residual_ptr, sum_ptr, x_stride, residual_stride, row, column, inside, width, ADD: tl.constexpr
):
    """The rows to normalize; with ADD they are residual + x, which is stored."""
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
        # Normalize the rounded sum, which is what the backward pass reads.
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + column, x, mask=inside)
    return x


@triton.jit
def load_rows(pointer, stride, start, row, column, inside):
    """Rows from `start` on: a 64-bit offset to the first, 32-bit offsets inside."""
    return tl.load(pointer + start * stride + (row * stride + column), mask=inside, other=0.0)


def forward(
    kernel: triton.JITFunction,
    num_statistics: int,
    x: Tensor,
    residual: Tensor | None,
    parameters: Sequence[Tensor],
    eps: float,
    out_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Normalized rows in `out_dtype`; the sum, if there is a residual; and the statistics of each row."""
    x_nd = as_rows(x)
    residual_nd = None if residual is None else as_rows(residual)
    num_rows, width = x_nd.shape
    total = None if residual is None else x.new_empty(x.shape, dtype=sum_dtype(x, residual))
    out = x.new_empty(x.shape, dtype=out_dtype)
    statistics = [x.new_empty(num_rows, dtype=torch.float32) for _ in range(num_statistics)]
    if num_rows:
        tile = row_tile(width, elements_per_thread=16 if width <= 4096 else 32)
        kernel[(triton.cdiv(num_rows, tile.rows),)](
            x_nd,
            x_nd if residual_nd is None else residual_nd,
            *parameters,
            out,
            out if total is None else total,
            *statistics,
            x_nd.stride(0),
            0 if residual_nd is None else residual_nd.stride(0),
            num_rows,
            width,
            eps,
            ADD=residual is not None,
            ROWS=tile.rows,
            WIDTH=tile.width,
            num_warps=tile.num_warps,
        )
    return out, total, statistics


def backward(
    kernel: triton.JITFunction,
    num_parameters: int,
    dout: Tensor,
    dsum: Tensor | None,
    x: Tensor,
    weight: Tensor,
    *statistics: Tensor,
) -> tuple[Tensor, ...]:
    """The gradients of the normalized input (plus `dsum`, if given) and of the parameters."""
    x_nd, dout_nd = as_rows(x), as_rows(dout)
    dsum_nd = None if dsum is None else as_rows(dsum)
    num_rows, width = x_nd.shape
    dx = x.new_empty(x.shape)
    tile = persistent_rows(width, [t.element_size() for t in (x_nd, dout_nd, dsum_nd) if t is not None])
    programs = tile.programs(num_rows, x.device)
    partial = x.new_empty(programs, num_parameters, width, dtype=torch.float32)
    kernel[(programs,)](
        dout_nd,
        dout_nd if dsum_nd is None else dsum_nd,
        x_nd,
        weight,
        *statistics,
        dx,
        partial,
        dout_nd.stride(0),
        0 if dsum_nd is None else dsum_nd.stride(0),
        x_nd.stride(0),
        num_rows,
        width,
        ADD=dsum is not None,
        ROWS=tile.rows,
        WIDTH=tile.width,
        STAGES=tile.stages,
        num_warps=tile.num_warps,
    )
    return dx, *sum_partials(partial, weight.dtype)
