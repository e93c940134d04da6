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

import triton
import triton.language as tl

from rush.kernels.norm_rows import load_input, load_rows


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
    rounded = load_input(
        x_ptr, residual_ptr, sum_ptr, x_stride, residual_stride, row, column, inside, width, ADD
    )
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
    first = tl.program_id(0).to(tl.int64) * ROWS
    step = tl.num_programs(0).to(tl.int64) * ROWS
    for start in tl.range(first, num_rows, step, num_stages=STAGES):
        inside_rows = row < num_rows - start
        inside = inside_rows & (column < width)
        x = load_rows(x_ptr, x_stride, start, row, column, inside).to(tl.float32)
        dout = load_rows(dout_ptr, dout_stride, start, row, column, inside).to(tl.float32)
        rstd = tl.load(rstd_ptr + start + row, mask=inside_rows, other=0.0)
        if ADD:
            dsum = load_rows(dsum_ptr, dsum_stride, start, row, column, inside)

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
