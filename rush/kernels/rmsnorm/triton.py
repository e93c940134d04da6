# mypy: allow-untyped-decorators
"""RMSNorm, forward and backward, each in one pass over memory.

Plain torch writes the fp32 copy, its square and the normalized value: each a round trip to device memory for a few
operations per element. Here a program loads whole rows into registers, reduces them and writes the result: every
element is read once and written once. With the residual add fused, the sum is computed on the way and written once.

Backward, with g = dy · weight and x̂ = x / rms, dx = (g − x̂ · mean(g · x̂)) / rms: again whole rows. The weight's
gradient is a sum over all rows: a fixed number of persistent programs (a few per SM) each accumulate their rows in
registers and write a partial sum; a second small kernel adds those. No atomics, so it is deterministic. The next rows
are prefetched into shared memory, which keeps memory busy with few programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rush.kernels.norm_ops import sum_dtype
from rush.kernels.partials import sum_partials
from rush.kernels.support import as_rows, persistent_rows, row_tile

# Shapes: n rows, d width.


@triton.jit
def rmsnorm_forward_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < num_rows) & (column < width)
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0, eviction_policy="evict_last")
    if ADD:
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
        residual_place = residual_ptr + row * residual_stride + column
        residual = tl.load(residual_place, mask=inside, other=0.0)
        # Normalize the rounded sum, which is what the backward pass reads.
        rounded = (residual.to(tl.float32) + x.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + column, rounded, mask=inside)
    else:
        rounded = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    wide = rounded.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(wide * wide, axis=1, keep_dims=True) / width + eps)
    scaled = (wide * rstd).to(rounded.dtype).to(tl.float32)
    out = (weight.to(tl.float32) * scaled).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + column, out, mask=inside)
    tl.store(rstd_ptr + row, rstd, mask=row < num_rows)


@triton.jit
def rmsnorm_backward_kernel(
    dout_ptr: tl.tensor,
    dsum_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    rstd_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    dout_stride: tl.tensor,
    dsum_stride: tl.tensor,
    x_stride: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < width, other=0.0)
    dweight = tl.zeros((1, WIDTH), tl.float32)
    # A 64-bit offset to the first row of a step, 32-bit offsets inside.
    first = tl.program_id(0).to(tl.int64) * ROWS
    step = tl.num_programs(0).to(tl.int64) * ROWS
    for start in tl.range(first, num_rows, step, num_stages=STAGES):
        inside_rows = row < num_rows - start
        inside = inside_rows & (column < width)
        x_place = x_ptr + start * x_stride + (row * x_stride + column)
        x = tl.load(x_place, mask=inside, other=0.0).to(tl.float32)
        dout_place = dout_ptr + start * dout_stride + (row * dout_stride + column)
        dout = tl.load(dout_place, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + start + row, mask=inside_rows, other=0.0)
        if ADD:
            dsum_place = dsum_ptr + start * dsum_stride + (row * dsum_stride + column)
            dsum = tl.load(dsum_place, mask=inside, other=0.0)

        scaled = x * rstd
        dweight += tl.sum(dout * scaled, axis=0, keep_dims=True)
        g = dout * weight.to(tl.float32)
        dx = rstd * (g - scaled * (tl.sum(g * scaled, axis=1, keep_dims=True) / width))
        if ADD:
            dx += dsum.to(tl.float32)
        dx_place = dx_ptr + start * width + (row * width + column)
        tl.store(dx_place, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    partial_place = partial_ptr + tl.program_id(0).to(tl.int64) * width + column
    tl.store(partial_place, dweight, mask=column < width)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Normalized rows in `out_dtype`; the sum, if there is a residual; and 1 / rms of each row."""
    x_nd = as_rows(x)
    residual_nd = None if residual is None else as_rows(residual)
    num_rows, width = x_nd.shape
    total = None if residual is None else torch.empty(x.shape, dtype=sum_dtype(x, residual), device=x.device)
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        tile = row_tile(width, elements_per_thread=16 if width <= 4096 else 32)
        rmsnorm_forward_kernel[(triton.cdiv(num_rows, tile.rows),)](
            x_nd,
            x_nd if residual_nd is None else residual_nd,
            weight,
            out,
            out if total is None else total,
            rstd,
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
    return out, total, rstd


def backward(
    dout: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the normalized input (plus `dsum`, if given) and of the weight."""
    x_nd, dout_nd = as_rows(x), as_rows(dout)
    dsum_nd = None if dsum is None else as_rows(dsum)
    num_rows, width = x_nd.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tile = persistent_rows(width, [t.element_size() for t in (x_nd, dout_nd, dsum_nd) if t is not None])
    programs = tile.programs(num_rows, x.device)
    partial = torch.empty(programs, 1, width, dtype=torch.float32, device=x.device)
    rmsnorm_backward_kernel[(programs,)](
        dout_nd,
        dout_nd if dsum_nd is None else dsum_nd,
        x_nd,
        weight,
        rstd,
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
    (dweight,) = sum_partials(partial, weight.dtype)
    return dx, dweight
