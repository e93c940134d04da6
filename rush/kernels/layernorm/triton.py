# mypy: allow-untyped-decorators
"""LayerNorm, forward and backward, each in one pass over memory.

As with RMSNorm, a program keeps whole rows in registers: read once, written once. The variance is computed from the
centered values in a second pass over registers, which is free and avoids cancellation.

Backward, with g = dy · weight and x̂ the normalized row: dx = rstd · (g − mean(g) − x̂ · mean(g · x̂)). The gradients of
weight and bias are sums over all rows: persistent programs accumulate partial sums in registers while the next rows are
prefetched, and a small kernel adds those. No atomics, so it is deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rush.kernels.norm_rows import load_input, load_rows


@triton.jit
def layernorm_forward_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    sum_ptr: tl.tensor,
    mean_ptr: tl.tensor,
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
    bias = tl.load(bias_ptr + column, mask=column < width, other=0.0, eviction_policy="evict_last")
    rounded = load_input(
        x_ptr, residual_ptr, sum_ptr, x_stride, residual_stride, row, column, inside, width, ADD
    )
    wide = rounded.to(tl.float32)
    mean = tl.sum(wide, axis=1, keep_dims=True) / width
    centered = tl.where(column < width, wide - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centered * centered, axis=1, keep_dims=True) / width + eps)
    out = centered * rstd * weight.to(tl.float32) + bias.to(tl.float32)
    tl.store(out_ptr + row * width + column, out.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(mean_ptr + row, mean, mask=row < num_rows)
    tl.store(rstd_ptr + row, rstd, mask=row < num_rows)


@triton.jit
def layernorm_backward_kernel(
    dout_ptr: tl.tensor,
    dsum_ptr: tl.tensor,
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    mean_ptr: tl.tensor,
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
    dbias = tl.zeros((1, WIDTH), tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS
    step = tl.num_programs(0).to(tl.int64) * ROWS
    for start in tl.range(first, num_rows, step, num_stages=STAGES):
        inside_rows = row < num_rows - start
        inside = inside_rows & (column < width)
        x = load_rows(x_ptr, x_stride, start, row, column, inside).to(tl.float32)
        dout = load_rows(dout_ptr, dout_stride, start, row, column, inside).to(tl.float32)
        mean = tl.load(mean_ptr + start + row, mask=inside_rows, other=0.0)
        rstd = tl.load(rstd_ptr + start + row, mask=inside_rows, other=0.0)
        if ADD:
            dsum = load_rows(dsum_ptr, dsum_stride, start, row, column, inside)

        # Beyond the row g is zero, so `scaled` there reaches no sum.
        scaled = (x - mean) * rstd
        dweight += tl.sum(dout * scaled, axis=0, keep_dims=True)
        dbias += tl.sum(dout, axis=0, keep_dims=True)
        g = dout * weight.to(tl.float32)
        # Both means in one reduction: half the barriers.
        mean_g, mean_gx = tl.split(tl.sum(tl.join(g, g * scaled), axis=1) / width)
        dx = rstd * (g - mean_g[:, None] - scaled * mean_gx[:, None])
        if ADD:
            dx += dsum.to(tl.float32)
        dx_place = dx_ptr + start * width + (row * width + column)
        tl.store(dx_place, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    partial_place = partial_ptr + tl.program_id(0).to(tl.int64) * 2 * width + column
    tl.store(partial_place, dweight, mask=column < width)
    tl.store(partial_place + width, dbias, mask=column < width)
