# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Cross-entropy over rows of logits, in one walk for the loss and one for the gradient.

Logits are the largest tensor of a language model: tokens × vocabulary. Plain torch converts them to fp32,
writes the log-softmax, picks the labels, and in the backward pass reads it all again. All that is needed
from a row, though, is one number, the log of Σ exp(logit). Here a program walks over a row in blocks with a
running maximum and a running sum: when a block raises the maximum, the sum so far is scaled down to match
(the "online" softmax of Milakov and Gimelshein 2018, arXiv:1805.02867), so one read suffices and nothing
overflows.

With that number known, the gradient of a logit is softmax − target, a function of the logit alone. So the
same program may walk over its row once more, most of it still in cache, and write the gradient over the
logits: nobody needs them any more, and no second tensor of that size exists. The backward pass then only
multiplies by the gradient that comes from above, and where that is 1 it touches nothing.

Sums are fp32 in a fixed order, without atomics: the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rush.kernels.support import next_power_of_2

# Shapes: n rows, v columns (the vocabulary), perhaps with columns of padding after them.

LARGEST_BLOCK = 16384
"""Columns a program holds at once, 16 a thread. One such program fills a multiprocessor; so do two of half the size, for
rows half as long. Either way the rows being worked on fit into the second-level cache (34 MB of a Hopper's 50 at a
vocabulary of 128,000), and the walk that writes the gradient finds them there."""
LONG_ROW = 65536


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
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    column = tl.arange(0, BLOCK)
    label = tl.load(labels_ptr + row)
    if label == ignore_index:
        tl.store(losses_ptr + row, 0.0)
        if WRITE_GRADIENT:
            nothing = tl.zeros((BLOCK,), logits_ptr.dtype.element_ty)
            for start in range(0, padded_columns, BLOCK):
                tl.store(row_ptr + start + column, nothing, mask=start + column < padded_columns)
        else:
            tl.store(lse_ptr + row, 0.0)
    else:
        largest = float("-inf")
        # One sum for each lane, added up at the end: the only exchange between threads per block is the maximum.
        sums = tl.zeros((BLOCK,), tl.float32)
        plain_sum = 0.0
        # The mask of a load ends at the padding, which is aligned, so that loads stay wide. The next block is on its way
        # while this one is reduced.
        coming = tl.load(row_ptr + column, mask=column < padded_columns, other=float("-inf"))
        for start in range(0, padded_columns, BLOCK):
            at = start + column
            x = tl.where(at < num_columns, coming.to(tl.float32), float("-inf"))
            after = at + BLOCK
            coming = tl.load(row_ptr + after, mask=after < padded_columns, other=float("-inf"))
            above = tl.maximum(largest, tl.max(x, axis=0))
            # All of it may be −inf so far, and −inf − (−inf) is no number.
            base = tl.where(above == float("-inf"), 0.0, above)
            sums = sums * tl.exp(largest - base) + tl.exp(x - base)
            largest = above
            if SMOOTHING:
                plain_sum += tl.sum(tl.where(at < num_columns, x, 0.0), axis=0)
        lse = largest + tl.log(tl.sum(sums, axis=0))
        # A label outside the vocabulary must not pass for a cheap one: its loss is not a number.
        known = (label >= 0) & (label < num_columns)
        label_logit = tl.load(row_ptr + label, mask=known, other=float("nan")).to(tl.float32)
        loss = lse - (1.0 - smoothing) * label_logit + z_loss * lse * lse
        if SMOOTHING:
            loss -= smoothing / num_columns * plain_sum
        tl.store(losses_ptr + row, loss)
        if WRITE_GRADIENT:
            coming = tl.load(row_ptr + column, mask=column < padded_columns, other=float("-inf"))
            for start in range(0, padded_columns, BLOCK):
                at = start + column
                x = coming.to(tl.float32)
                after = at + BLOCK
                coming = tl.load(row_ptr + after, mask=after < padded_columns, other=float("-inf"))
                gradient = tl.exp(x - lse) * (1.0 + 2.0 * z_loss * lse) - smoothing / num_columns
                gradient = tl.where(at == label, gradient - (1.0 - smoothing), gradient)
                gradient = tl.where(at < num_columns, gradient * gradient_scale, 0.0)
                tl.store(row_ptr + at, gradient.to(logits_ptr.dtype.element_ty), mask=at < padded_columns)
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
    *,
    num_columns: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    gradient_scale: float = 1.0,
) -> None:
    """Fill in the losses; and the logs of the softmax's denominators, or without a place for them the gradient over
    the logits. Columns from `num_columns` on are padding, whose gradient is zero."""
    num_rows, padded_columns = logits_nv.shape
    if num_rows == 0:
        return
    assert logits_nv.stride(1) == 1
    assert labels_n.is_contiguous()
    largest = LARGEST_BLOCK if padded_columns > LONG_ROW else LARGEST_BLOCK // 2
    block = min(max(16, next_power_of_2(padded_columns)), largest)
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
        num_warps=max(1, min(32, block // 512)),
    )


def backward(
    logits_nv: Tensor,
    labels_n: Tensor,
    lse_n: Tensor,
    upstream_n: Tensor,
    out_nv: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """The gradient of the logits, given that of each row's loss (perhaps one number for all: a stride of 0). It may be
    written over the logits."""
    num_rows, num_columns = logits_nv.shape
    if num_rows == 0:
        return
    assert logits_nv.stride(1) == out_nv.stride(1) == 1
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
    """Multiply each row by its scale and a common factor, in fp32, in place; rows whose product is 1 are not touched.

    The scale is read on the device, so nothing waits for it.
    """
    num_rows, width = x_nd.shape
    if num_rows == 0:
        return
    assert x_nd.stride(1) == 1
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
