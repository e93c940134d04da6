# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Cross-entropy over rows of logits: one pass for the loss, one for the gradient.

Logits are the largest tensor of a language model: tokens × vocabulary. Plain torch converts them to fp32, writes the
log-softmax, gathers the labels, and reads it all again in the backward pass. All a row needs is its logsumexp. Here a
program loops over the row in blocks with a running maximum and sum: when a block raises the maximum, the sum is
rescaled (online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867). One read suffices and nothing overflows.

Given the logsumexp, the gradient of a logit is softmax − target, a function of that logit alone. So the same program
can loop over its row again, backwards, because the blocks read last are still in L2, and overwrite the logits with
their gradient. The backward pass multiplies by the upstream gradient and writes nothing where that is 1.

To reach the memory bandwidth, only some 25 instructions per element fit. So threads do not communicate before the end
of a row: each keeps a maximum and a sum for every 16-byte vector it loads. Exponentials are exp2, which the hardware
has. Only the last block is masked, and the label's element is corrected afterwards.

Sums are fp32 in a fixed order, without atomics: deterministic.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rush.kernels.fast_math import LOG2_E, exp2
from rush.kernels.support import next_power_of_2

# Shapes: n rows, v columns (the vocabulary), perhaps with columns of padding after them.

LARGEST_BLOCK = 8192
"""Columns per block."""
COLUMNS_PER_THREAD = 8
"""One 16-byte vector in bf16. A program of 32 warps handles a row, and an SM two rows at most: the rows in flight fit
into L2 (34 of a Hopper's 50 MB at 128,000 columns), and the gradient pass finds them there. Nothing tried (more columns
per thread, fewer warps, several rows per program, prefetched blocks) was faster at both 50,000 and 128,000 columns."""

LOWEST = tl.constexpr(-1e38)
"""Initial running maximum: below any logit, but finite, since −inf − (−inf) is NaN."""


@triton.jit
def online_softmax(x, highest, sums):
    """Running maximum and sum of exponentials of each lane, updated with one block of logits."""
    above = tl.maximum(highest, tl.max(x, axis=1))
    powers = exp2((x - above[:, None]) * LOG2_E)
    return above, sums * exp2((highest - above) * LOG2_E) + tl.sum(powers, axis=1)


@triton.jit
def cross_entropy_forward_kernel(
    logits_ptr,
    labels_ptr,
    losses_ptr,
    lse_ptr,
    row_stride,
    num_columns,
    padded_columns,
    ignore_index,
    gradient_scale,
    WRITE_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    LANES: tl.constexpr = BLOCK // VECTOR
    dtype = logits_ptr.dtype.element_ty
    column = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    # Blocks up to here are full. Loads after it end at the aligned padding, so they stay vectorized.
    whole = num_columns // BLOCK * BLOCK
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    block_ptr = row_ptr + column
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        if WRITE_GRADIENT:
            for start in range(0, padded_columns, BLOCK):
                zeros = tl.zeros((LANES, VECTOR), dtype)
                tl.store(block_ptr + start, zeros, mask=column < padded_columns - start)
        else:
            tl.store(lse_ptr + row, 0.0)
    else:
        # A label outside the vocabulary gives a NaN loss.
        known = (label >= 0) & (label < num_columns)
        # Loaded before the first reduction across threads, so before any of them writes a gradient.
        label_logit = tl.load(row_ptr + label, mask=known, other=float("nan")).to(tl.float32)

        highest = tl.full((LANES,), LOWEST, tl.float32)
        sums = tl.zeros((LANES,), tl.float32)
        for start in range(0, whole, BLOCK):
            x = tl.load(block_ptr + start).to(tl.float32)
            highest, sums = online_softmax(x, highest, sums)
        if whole < num_columns:
            x = tl.load(block_ptr + whole, mask=column < padded_columns - whole, other=0.0).to(tl.float32)
            inside = column < num_columns - whole
            highest, sums = online_softmax(tl.where(inside, x, float("-inf")), highest, sums)
        top = tl.max(highest, axis=0)
        lse = top + tl.log(tl.sum(sums * exp2((highest - top) * LOG2_E), axis=0))

        tl.store(losses_ptr + row, lse - label_logit)
        if WRITE_GRADIENT:
            for start in range(whole, padded_columns, BLOCK):
                stored = column < padded_columns - start
                x = tl.load(block_ptr + start, mask=stored, other=0.0).to(tl.float32)
                gradient = exp2((x - lse) * LOG2_E) * gradient_scale
                gradient = tl.where(column < num_columns - start, gradient, 0.0)
                tl.store(block_ptr + start, gradient.to(dtype), mask=stored)
            for done in range(BLOCK, whole + BLOCK, BLOCK):
                x = tl.load(block_ptr + (whole - done)).to(tl.float32)
                gradient = exp2((x - lse) * LOG2_E) * gradient_scale
                tl.store(block_ptr + (whole - done), gradient.to(dtype))
            # After the thread that owns this element has written its block.
            tl.debug_barrier()
            gradient = exp2((label_logit - lse) * LOG2_E) * gradient_scale
            tl.store(row_ptr + label, (gradient - gradient_scale).to(dtype), mask=known)
        else:
            tl.store(lse_ptr + row, lse)


@triton.jit
def cross_entropy_backward_kernel(
    logits_ptr,
    labels_ptr,
    lse_ptr,
    upstream_ptr,
    out_ptr,
    row_stride,
    out_stride,
    upstream_stride,
    num_columns,
    ignore_index,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_columns
    label = tl.load(labels_ptr + row)
    lse = tl.load(lse_ptr + row)
    upstream = tl.load(upstream_ptr + row * upstream_stride).to(tl.float32)
    x = tl.load(logits_ptr + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    # An ignored row has no logsumexp, and exp of its logits could overflow.
    x = tl.where(label == ignore_index, lse, x)
    gradient = tl.exp(x - lse)
    gradient = tl.where(at == label, gradient - 1.0, gradient)
    gradient = tl.where(label == ignore_index, 0.0, gradient * upstream)
    tl.store(out_ptr + row * out_stride + at, gradient.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def scale_rows_kernel(x_ptr, scales_ptr, row_stride, scale_stride, width, factor, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scales_ptr + row * scale_stride).to(tl.float32) * factor
    if scale != 1.0:
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        pointers = x_ptr + row * row_stride + at
        x = tl.load(pointers, mask=at < width, other=0.0).to(tl.float32)
        tl.store(pointers, (x * scale).to(x_ptr.dtype.element_ty), mask=at < width)


def forward(
    logits_nv: Tensor,
    labels_n: Tensor,
    losses_n: Tensor,
    lse_n: Tensor | None,
    num_columns: int,
    ignore_index: int,
    gradient_scale: float,
) -> None:
    """See `passes.forward`; for at least one row."""
    num_rows, padded_columns = logits_nv.shape
    # Triton vectorizes loads only if rows are known to be aligned; otherwise each column is a lane of its own.
    aligned = logits_nv.stride(0) % 16 == 0 and logits_nv.data_ptr() % 16 == 0
    vector = 16 // logits_nv.element_size() if aligned else 1
    block = min(max(16, next_power_of_2(padded_columns)), LARGEST_BLOCK)
    cross_entropy_forward_kernel[(num_rows,)](
        logits_nv,
        labels_n,
        losses_n,
        lse_n if lse_n is not None else losses_n,
        logits_nv.stride(0),
        num_columns,
        padded_columns,
        ignore_index,
        gradient_scale,
        WRITE_GRADIENT=lse_n is None,
        BLOCK=block,
        VECTOR=vector,
        num_warps=max(1, min(32, block // (32 * COLUMNS_PER_THREAD))),
    )


def backward(
    logits_nv: Tensor, labels_n: Tensor, lse_n: Tensor, upstream_n: Tensor, out_nv: Tensor, ignore_index: int
) -> None:
    """See `passes.backward`; for at least one row."""
    num_rows, num_columns = logits_nv.shape
    block = min(max(16, next_power_of_2(num_columns)), 4096)
    cross_entropy_backward_kernel[(num_rows, triton.cdiv(num_columns, block))](
        logits_nv,
        labels_n,
        lse_n,
        upstream_n,
        out_nv,
        logits_nv.stride(0),
        out_nv.stride(0),
        upstream_n.stride(0),
        num_columns,
        ignore_index,
        BLOCK=block,
        num_warps=max(1, min(8, block // 512)),
    )


def scale_rows(x_nd: Tensor, scales_n: Tensor, factor: float) -> None:
    """See `passes.scale_rows`; for at least one row."""
    num_rows, width = x_nd.shape
    block = min(max(16, next_power_of_2(width)), 4096)
    scale_rows_kernel[(num_rows, triton.cdiv(width, block))](
        x_nd,
        scales_n,
        x_nd.stride(0),
        scales_n.stride(0),
        width,
        factor,
        BLOCK=block,
        num_warps=max(1, min(8, block // 512)),
    )
