# mypy: allow-untyped-decorators
"""The LM head and its loss with 8-bit factors: the same chunks, three products at twice the rate.

The head is a fifth of a small model's arithmetic. Its factors are cast as those of other 8-bit layers are: hidden vectors
and weight to e4m3, the gradient of the logits to e5m2, one scale for each. That last scale need not be looked for,
since softmax − target lies between −1 and 1. The loss is computed from logits in 16 bits, and reads them only: a second
kernel makes a tile of their gradient from the logits and one number a row, and writes it in 8 bits as it is and turned
over, as the two products that follow want it. So nothing of 16 bits is written that big a second time: per logit 2 bytes
written and 4 read in 16 bits, 2 written and 2 read in 8.

The weight's gradient is a sum over chunks in bf16, or in fp32 from MOST_ROUNDED of them on.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rush.kernels.cross_entropy import passes
from rush.kernels.fast_math import LOG2_E, exp2
from rush.kernels.fp8_linear.operands import cast_by_kernel, product
from rush.kernels.fp8_linear.reference import E4M3, E5M2, Scaled
from rush.kernels.support import op

# Shapes: n tokens, d hidden, v vocabulary, p the vocabulary padded, c tokens of a chunk.

ROWS, COLUMNS = 128, 128
"""Of a tile. Turned over, its rows are as many bytes side by side in memory: a whole line."""
NUM_WARPS = 8
LOG2_SCALE = 14
SCALE = 2.0**LOG2_SCALE
"""Of the gradient of a logit: 1 becomes this, with room to 3.5, which smoothing and z-loss do not reach; 2⁻³⁰ is still a number."""


@triton.jit
def fp8_logits_gradient_kernel(
    logits_ptr: tl.tensor,
    labels_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    one_ptr: tl.tensor,
    out_ptr: tl.tensor,
    turned_ptr: tl.tensor,
    words_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    padded_columns: tl.tensor,
    ignore_index: tl.tensor,
    smoothing: tl.tensor,
    z_loss: tl.tensor,
    SMOOTHED: tl.constexpr,
    WITH_Z: tl.constexpr,
    LOG2_SCALE: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Softmax · SCALE everywhere, then what few places differ: the padding and one label a row, written over.

    Bytes are turned over by fours: rows 4i to 4i + 3 of a column make one word, and words change places on chip at a quarter
    of the cost of bytes.
    """
    first_row, first_column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    quad, column = tl.arange(0, ROWS // 4), tl.arange(0, COLUMNS)
    start = first_row.to(tl.int64) * padded_columns + first_column
    # Casts are made once more for the other layout, with a 1 that the assembler cannot know: fp8_mlp's kernels say why.
    one = tl.load(one_ptr)
    word = tl.zeros((ROWS // 4, COLUMNS), tl.int32)
    for member in tl.static_range(4):
        row = first_row + 4 * quad + member
        label = tl.load(labels_ptr + row, mask=row < num_rows, other=ignore_index)
        lse = tl.load(lse_ptr + row, mask=row < num_rows, other=0.0)
        known = label != ignore_index
        shift = tl.where(known, LOG2_SCALE - lse * LOG2_E, float("-inf"))
        place = (4 * quad + member)[:, None] * padded_columns + column[None, :]
        inside = (row < num_rows)[:, None] & (first_column + column < padded_columns)[None, :]
        x = tl.load(logits_ptr + start + place, mask=inside, other=0.0).to(tl.float32)
        gradient = exp2(x * LOG2_E + shift[:, None])
        if WITH_Z:
            gradient *= (1.0 + 2.0 * z_loss * lse)[:, None]
        if SMOOTHED:
            even = SCALE * smoothing / num_columns
            gradient -= tl.where(known, even, 0.0)[:, None]
        tl.store(out_ptr + start + place, gradient.to(out_ptr.dtype.element_ty), mask=inside)
        byte = (gradient * one).to(out_ptr.dtype.element_ty).to(tl.uint8, bitcast=True)
        word = word | (byte.to(tl.int32) << (8 * member))
    num_words = num_rows // 4
    inside = (first_row // 4 + quad < num_words)[:, None] & (first_column + column < padded_columns)[None, :]
    words_ptr += first_column.to(tl.int64) * num_words + first_row // 4
    turned_place = column[None, :] * num_words + quad[:, None]
    tl.store(words_ptr + turned_place, word, mask=inside)
    tl.debug_barrier()
    if first_column + COLUMNS > num_columns:
        beyond = inside & (first_column + column >= num_columns)[None, :]
        nothing = tl.zeros((ROWS // 4, COLUMNS), out_ptr.dtype.element_ty)
        for member in tl.static_range(4):
            place = (4 * quad + member)[:, None] * padded_columns + column[None, :]
            tl.store(out_ptr + start + place, nothing, mask=beyond)
        tl.store(words_ptr + turned_place, tl.zeros((ROWS // 4, COLUMNS), tl.int32), mask=beyond)
    row = (first_row + tl.arange(0, ROWS)).to(tl.int64)
    label = tl.load(labels_ptr + row, mask=row < num_rows, other=ignore_index)
    here = (label != ignore_index) & (label >= first_column) & (label < first_column + COLUMNS)
    x = tl.load(logits_ptr + row * padded_columns + label, mask=here, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + row, mask=here, other=0.0)
    gradient = (
        exp2((x - lse) * LOG2_E) * (1.0 + 2.0 * z_loss * lse) - smoothing / num_columns - (1.0 - smoothing)
    )
    cast = (gradient * SCALE).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * padded_columns + label, cast, mask=here)
    tl.store(turned_ptr + label * num_rows + row, cast, mask=here)


@op("fp8_logits_gradient")
def logits_gradient(
    logits_cp: Tensor,
    labels_c: Tensor,
    lse_c: Tensor,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """The gradient of the summed loss by the logits, times SCALE, and its transpose. Rows come by fours."""
    num_rows, padded = logits_cp.shape
    out = torch.empty(num_rows, padded, dtype=E5M2, device=logits_cp.device)
    turned = torch.empty(padded, num_rows, dtype=E5M2, device=logits_cp.device)
    grid = (triton.cdiv(num_rows, ROWS), triton.cdiv(padded, COLUMNS))
    fp8_logits_gradient_kernel[grid](
        logits_cp,
        labels_c,
        lse_c,
        torch.ones((), device=logits_cp.device),
        out,
        turned,
        turned.view(torch.int32),
        num_rows,
        vocab_size,
        padded,
        ignore_index,
        label_smoothing,
        z_loss,
        SMOOTHED=label_smoothing != 0,
        WITH_Z=z_loss != 0,
        LOG2_SCALE=LOG2_SCALE,
        SCALE=SCALE,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=NUM_WARPS,
    )
    return out, turned


@logits_gradient.register_fake
def _(
    logits_cp: Tensor,
    labels_c: Tensor,
    lse_c: Tensor,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    num_rows, padded = logits_cp.shape
    return logits_cp.new_empty(num_rows, padded, dtype=E5M2), logits_cp.new_empty(
        padded, num_rows, dtype=E5M2
    )


def loss_and_gradients(
    hidden_nd: Tensor,
    weight_pd: Tensor,
    labels_n: Tensor,
    *,
    vocab_size: int,
    chunk_tokens: int,
    weight_dtype: torch.dtype,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    want_hidden: bool,
    want_weight: bool,
    fast: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the function of this name of `chunks.py`, for a weight that is aligned and hidden vectors of its dtype."""
    (num_tokens, width), dtype = hidden_nd.shape, weight_pd.dtype
    losses_n = hidden_nd.new_empty(num_tokens, dtype=torch.float32)
    lse_c = losses_n.new_empty(chunk_tokens)
    d_hidden_nd = hidden_nd.new_empty((num_tokens, width) if want_hidden else (0, width), dtype=dtype)
    d_weight_pd = weight_pd.new_zeros(weight_pd.shape if want_weight else (0, width), dtype=weight_dtype)
    weight, weight_turned = cast_by_kernel(weight_pd, E4M3)
    unit = torch.full((), 1 / SCALE, device=hidden_nd.device)
    for first in range(0, num_tokens, chunk_tokens):
        here = slice(first, first + chunk_tokens)
        labels_c = labels_n[here]
        chunk, chunk_turned = cast_by_kernel(hidden_nd[here], E4M3)
        logits_cp = product(chunk, weight, dtype, fast=True)
        passes.forward(
            logits_cp,
            labels_c,
            losses_n[here],
            lse_c,
            num_columns=vocab_size,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            gradient_scale=1.0,
        )
        if not (want_hidden or want_weight):
            continue
        gradient, turned = (
            Scaled(values, unit)
            for values in logits_gradient(
                logits_cp, labels_c, lse_c, vocab_size, ignore_index, label_smoothing, z_loss
            )
        )
        del logits_cp
        if want_hidden:
            d_hidden_nd[here] = product(gradient, weight_turned, dtype, fast)
        if want_weight:
            d_weight_pd += product(turned, chunk_turned, weight_dtype, fast)
        # Or the next chunk's would be made beside them.
        del gradient, turned
    return losses_n, d_hidden_nd, d_weight_pd[:vocab_size]
