# mypy: allow-untyped-decorators
"""The LM head and its loss with fp8 operands: the same chunks, three matmuls at twice the rate.

The head is a fifth of a small model's FLOPs. Its operands are cast as in other fp8 layers: hidden states and weight to
e4m3, the logits' gradient to e5m2, one scale per tensor. The gradient's scale is constant, since softmax − target lies
between −1 and 1. The loss reads 16-bit logits; a second kernel computes a tile of their gradient from the logits and
each row's logsumexp, and writes it in fp8 in both layouts, row-major and transposed, as the two matmuls need it. Per logit: 2 bytes
written and 4 read in 16 bits, 2 written and 2 read in fp8.

The weight's gradient is summed over chunks in bf16, or in fp32 above MOST_ROUNDED chunks.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rush.kernels.cross_entropy import passes
from rush.kernels.fast_math import LOG2_E, exp2
from rush.kernels.fp8_linear.operands import cast_transpose_triton, scaled_mm
from rush.kernels.fp8_linear.reference import E4M3, E5M2, Fp8Tensor
from rush.kernels.support import op

# Shapes: n tokens, d hidden, v vocabulary, p the vocabulary padded, c tokens of a chunk.

ROWS, COLUMNS = 128, 128
"""Tile size: transposed, its rows are a full cache line."""
NUM_WARPS = 8
LOG2_SCALE = 14
SCALE = 2.0**LOG2_SCALE
"""Scale of the logits' gradient: 1 becomes 2¹⁴, of at most 3.5 · 2¹⁴; 2⁻³⁰ is still representable."""


@triton.jit
def fp8_logits_gradient_kernel(
    logits_ptr: tl.tensor,
    labels_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    one_ptr: tl.tensor,
    out_ptr: tl.tensor,
    transposed_ptr: tl.tensor,
    packed_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    padded_columns: tl.tensor,
    ignore_index: tl.tensor,
    LOG2_SCALE: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Write softmax · SCALE everywhere, then overwrite the padding and the label of each row.

    Bytes are transposed in groups of four: rows 4i to 4i + 3 of a column form one int32, a quarter of the shuffles.
    """
    first_row, first_column = tl.program_id(0) * ROWS, tl.program_id(1) * COLUMNS
    quad, column = tl.arange(0, ROWS // 4), tl.arange(0, COLUMNS)
    start = first_row.to(tl.int64) * padded_columns + first_column
    # Cast again for the other layout, times a 1 that ptxas cannot know: see fp8_mlp/triton.py.
    one = tl.load(one_ptr)
    packed = tl.zeros((ROWS // 4, COLUMNS), tl.int32)
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
        tl.store(out_ptr + start + place, gradient.to(out_ptr.dtype.element_ty), mask=inside)
        byte = (gradient * one).to(out_ptr.dtype.element_ty).to(tl.uint8, bitcast=True)
        packed = packed | (byte.to(tl.int32) << (8 * member))
    num_packed = num_rows // 4
    inside = (first_row // 4 + quad < num_packed)[:, None] & (first_column + column < padded_columns)[None, :]
    packed_ptr += first_column.to(tl.int64) * num_packed + first_row // 4
    transposed_place = column[None, :] * num_packed + quad[:, None]
    tl.store(packed_ptr + transposed_place, packed, mask=inside)
    tl.debug_barrier()
    if first_column + COLUMNS > num_columns:
        beyond = inside & (first_column + column >= num_columns)[None, :]
        zeros = tl.zeros((ROWS // 4, COLUMNS), out_ptr.dtype.element_ty)
        for member in tl.static_range(4):
            place = (4 * quad + member)[:, None] * padded_columns + column[None, :]
            tl.store(out_ptr + start + place, zeros, mask=beyond)
        tl.store(packed_ptr + transposed_place, tl.zeros((ROWS // 4, COLUMNS), tl.int32), mask=beyond)
    row = (first_row + tl.arange(0, ROWS)).to(tl.int64)
    label = tl.load(labels_ptr + row, mask=row < num_rows, other=ignore_index)
    here = (label != ignore_index) & (label >= first_column) & (label < first_column + COLUMNS)
    x = tl.load(logits_ptr + row * padded_columns + label, mask=here, other=0.0).to(tl.float32)
    lse = tl.load(lse_ptr + row, mask=here, other=0.0)
    gradient = exp2((x - lse) * LOG2_E) - 1.0
    cast = (gradient * SCALE).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * padded_columns + label, cast, mask=here)
    tl.store(transposed_ptr + label * num_rows + row, cast, mask=here)


@op("fp8_logits_gradient")
def logits_gradient(
    logits_cp: Tensor, labels_c: Tensor, lse_c: Tensor, vocab_size: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """The gradient of the summed loss by the logits, times SCALE, and its transpose. A multiple of four rows."""
    num_rows, padded = logits_cp.shape
    out = torch.empty(num_rows, padded, dtype=E5M2, device=logits_cp.device)
    transposed = torch.empty(padded, num_rows, dtype=E5M2, device=logits_cp.device)
    grid = (triton.cdiv(num_rows, ROWS), triton.cdiv(padded, COLUMNS))
    fp8_logits_gradient_kernel[grid](
        logits_cp,
        labels_c,
        lse_c,
        torch.ones((), device=logits_cp.device),
        out,
        transposed,
        transposed.view(torch.int32),
        num_rows,
        vocab_size,
        padded,
        ignore_index,
        LOG2_SCALE=LOG2_SCALE,
        SCALE=SCALE,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=NUM_WARPS,
    )
    return out, transposed


@logits_gradient.register_fake
def _(logits_cp: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
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
    hidden_grad: bool,
    weight_grad: bool,
    fast_accum: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `chunks.loss_and_gradients`, for an aligned weight and hidden states of its dtype."""
    (num_tokens, width), dtype = hidden_nd.shape, weight_pd.dtype
    losses_n = hidden_nd.new_empty(num_tokens, dtype=torch.float32)
    lse_c = losses_n.new_empty(chunk_tokens)
    d_hidden_nd = hidden_nd.new_empty((num_tokens, width) if hidden_grad else (0, width), dtype=dtype)
    d_weight_pd = weight_pd.new_zeros(weight_pd.shape if weight_grad else (0, width), dtype=weight_dtype)
    weight, weight_transposed = cast_transpose_triton(weight_pd, E4M3)
    inv_scale = torch.full((), 1 / SCALE, device=hidden_nd.device)
    for first in range(0, num_tokens, chunk_tokens):
        here = slice(first, first + chunk_tokens)
        labels_c = labels_n[here]
        chunk, chunk_transposed = cast_transpose_triton(hidden_nd[here], E4M3)
        logits_cp = scaled_mm(chunk, weight, dtype, fast_accum=True)
        passes.forward(
            logits_cp,
            labels_c,
            losses_n[here],
            lse_c,
            num_columns=vocab_size,
            ignore_index=ignore_index,
            gradient_scale=1.0,
        )
        if not (hidden_grad or weight_grad):
            continue
        gradient, transposed = (
            Fp8Tensor(values, inv_scale)
            for values in logits_gradient(logits_cp, labels_c, lse_c, vocab_size, ignore_index)
        )
        del logits_cp
        if hidden_grad:
            d_hidden_nd[here] = scaled_mm(gradient, weight_transposed, dtype, fast_accum)
        if weight_grad:
            d_weight_pd += scaled_mm(transposed, chunk_transposed, weight_dtype, fast_accum)
        # Freed before the next chunk's are allocated.
        del gradient, transposed
    return losses_n, d_hidden_nd, d_weight_pd[:vocab_size]
