# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Cross-entropy over rows of logits, in one walk for the loss and one for the gradient.

Logits are the largest tensor of a language model: tokens × vocabulary. Plain torch converts them to fp32,
writes the log-softmax, picks the labels, and in the backward pass reads it all again. All that is needed
from a row, though, is one number, the log of Σ exp(logit). Here a program walks over a row in blocks with
running maxima and running sums: when a block raises a maximum, its sum so far is scaled down to match
(the "online" softmax of Milakov and Gimelshein 2018, arXiv:1805.02867), so one read suffices and nothing
overflows.

With that number known, the gradient of a logit is softmax − target, a function of the logit alone. So the
same program may walk over its row once more, backwards, because what it read last is still in the nearest
cache, and write the gradient over the logits: nobody needs them any more, and no second tensor of that size
exists. The backward pass then only multiplies by the gradient that comes from above, and where that is 1 it
touches nothing.

A walk keeps pace with the memory only if it is frugal: some 25 instructions per element fit into its time.
So threads do not talk to each other before a row's end: each keeps a maximum and a sum for every vector of
16 bytes that it loads. Powers are those of 2, since that is what the hardware has. Masks are left to the
last block, and the label's element is put right after the walk.

Sums are fp32 in a fixed order, without atomics: the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rush.kernels.fast_math import LOG2_E, exp2
from rush.kernels.support import next_power_of_2

# Shapes: n rows, v columns (the vocabulary), perhaps with columns of padding after them.

LARGEST_BLOCK = 8192
"""Columns a program holds at once."""
COLUMNS_OF_A_THREAD = 8
"""One vector of 16 bytes in bf16. So a program of 32 warps has a row, and a multiprocessor two rows at most: those being
worked on fit into the second-level cache (34 MB of a Hopper's 50 at 128,000 columns), and the walk that writes the gradient
finds them there. Nothing tried (more columns a thread, fewer warps, rows in turn, blocks loaded ahead) was faster at both
50,000 and 128,000 columns."""

NOTHING = tl.constexpr(-1e38)
"""Where running maxima start. Less than any logit, yet a number: −inf − (−inf) is none."""


@triton.jit
def take_in(x, highest, sums):
    """The lanes' maxima and sums of powers relative to them, with one more block of logits."""
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
    smoothing,
    z_loss,
    gradient_scale,
    WRITE_GRADIENT: tl.constexpr,
    SMOOTHING: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    LANES: tl.constexpr = BLOCK // VECTOR
    dtype = logits_ptr.dtype.element_ty
    column = tl.arange(0, LANES)[:, None] * VECTOR + tl.arange(0, VECTOR)[None, :]
    # Up to here blocks are whole. Loads after it end at the padding, which is aligned, so that they stay wide.
    whole = num_columns // BLOCK * BLOCK
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    block_ptr = row_ptr + column
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        if WRITE_GRADIENT:
            for start in range(0, padded_columns, BLOCK):
                nothing = tl.zeros((LANES, VECTOR), dtype)
                tl.store(block_ptr + start, nothing, mask=column < padded_columns - start)
        else:
            tl.store(lse_ptr + row, 0.0)
    else:
        # A label outside the vocabulary must not pass for a cheap one: its loss is not a number.
        known = (label >= 0) & (label < num_columns)
        # Before the first exchange between threads, and so before any of them writes a gradient.
        label_logit = tl.load(row_ptr + label, mask=known, other=float("nan")).to(tl.float32)

        highest = tl.full((LANES,), NOTHING, tl.float32)
        sums = tl.zeros((LANES,), tl.float32)
        mean = tl.zeros((LANES,), tl.float32)  # a lane's part of it
        for start in range(0, whole, BLOCK):
            x = tl.load(block_ptr + start).to(tl.float32)
            highest, sums = take_in(x, highest, sums)
            if SMOOTHING:
                mean += tl.sum(x * (1.0 / num_columns), axis=1)
        if whole < num_columns:
            x = tl.load(block_ptr + whole, mask=column < padded_columns - whole, other=0.0).to(tl.float32)
            inside = column < num_columns - whole
            highest, sums = take_in(tl.where(inside, x, float("-inf")), highest, sums)
            if SMOOTHING:
                mean += tl.sum(tl.where(inside, x * (1.0 / num_columns), 0.0), axis=1)
        top = tl.max(highest, axis=0)
        lse = top + tl.log(tl.sum(sums * exp2((highest - top) * LOG2_E), axis=0))

        loss = lse - (1.0 - smoothing) * label_logit + z_loss * lse * lse
        if SMOOTHING:
            loss -= smoothing * tl.sum(mean, axis=0)
        tl.store(losses_ptr + row, loss)
        if WRITE_GRADIENT:
            slope = (1.0 + 2.0 * z_loss * lse) * gradient_scale
            flat = smoothing / num_columns * gradient_scale
            for start in range(whole, padded_columns, BLOCK):
                stored = column < padded_columns - start
                x = tl.load(block_ptr + start, mask=stored, other=0.0).to(tl.float32)
                gradient = exp2((x - lse) * LOG2_E) * slope
                if SMOOTHING:
                    gradient -= flat
                gradient = tl.where(column < num_columns - start, gradient, 0.0)
                tl.store(block_ptr + start, gradient.to(dtype), mask=stored)
            for done in range(BLOCK, whole + BLOCK, BLOCK):
                x = tl.load(block_ptr + (whole - done)).to(tl.float32)
                gradient = exp2((x - lse) * LOG2_E) * slope
                if SMOOTHING:
                    gradient -= flat
                tl.store(block_ptr + (whole - done), gradient.to(dtype))
            # Not until the thread that has this element as one of many has written it.
            tl.debug_barrier()
            gradient = exp2((label_logit - lse) * LOG2_E) * slope
            gradient -= flat + (1.0 - smoothing) * gradient_scale
            tl.store(row_ptr + label, gradient.to(dtype), mask=known)
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
    smoothing,
    z_loss,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_columns
    label = tl.load(labels_ptr + row)
    lse = tl.load(lse_ptr + row)
    upstream = tl.load(upstream_ptr + row * upstream_stride).to(tl.float32)
    x = tl.load(logits_ptr + row * row_stride + at, mask=inside, other=0.0).to(tl.float32)
    # A row without a label has no sum of its own, and its logits may be beyond what exp can take.
    x = tl.where(label == ignore_index, lse, x)
    gradient = tl.exp(x - lse) * (1.0 + 2.0 * z_loss * lse) - smoothing / num_columns
    gradient = tl.where(at == label, gradient - (1.0 - smoothing), gradient)
    gradient = tl.where(label == ignore_index, 0.0, gradient * upstream)
    tl.store(out_ptr + row * out_stride + at, gradient.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def scale_rows_kernel(
    x_ptr,
    scales_ptr,
    row_stride,
    scale_stride,
    width,
    factor,
    BLOCK: tl.constexpr,
):
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
    label_smoothing: float,
    z_loss: float,
    gradient_scale: float,
) -> None:
    """What `passes.forward` says, for at least one row."""
    num_rows, padded_columns = logits_nv.shape
    # What Triton must know to load 16 bytes at once. Otherwise a thread's columns lie apart, and each is a lane of its own.
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
        label_smoothing,
        z_loss,
        gradient_scale,
        WRITE_GRADIENT=lse_n is None,
        SMOOTHING=label_smoothing > 0,
        BLOCK=block,
        VECTOR=vector,
        num_warps=max(1, min(32, block // (32 * COLUMNS_OF_A_THREAD))),
    )


def backward(
    logits_nv: Tensor,
    labels_n: Tensor,
    lse_n: Tensor,
    upstream_n: Tensor,
    out_nv: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """What `passes.backward` says, for at least one row."""
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
        label_smoothing,
        z_loss,
        BLOCK=block,
        num_warps=max(1, min(8, block // 512)),
    )


def scale_rows(x_nd: Tensor, scales_n: Tensor, factor: float) -> None:
    """What `passes.scale_rows` says, for at least one row."""
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
