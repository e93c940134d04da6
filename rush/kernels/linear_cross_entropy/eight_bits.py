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

from rush.kernels.cross_entropy import triton as cross_entropy
from rush.kernels.fp8_linear.factors import cast_by_kernel, product
from rush.kernels.fp8_linear.reference import E4M3, E5M2, Scaled
from rush.kernels.quick_math import LOG2_E, exp2
from rush.kernels.support import op

# Shapes: n tokens, d hidden, v vocabulary, p the vocabulary padded, c tokens of a chunk.

BLOCK = 128
NUM_WARPS = 8
SCALE = 2.0**14
"""Of the gradient of a logit: 1 becomes this, with room to 3.5, which smoothing and z-loss do not reach; 2⁻³⁰ is still a number."""


@triton.jit
def fp8_logits_gradient_kernel(
    logits_ptr: tl.tensor,
    labels_ptr: tl.tensor,
    lse_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    same_scale_ptr: tl.tensor,
    out_ptr: tl.tensor,
    turned_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    padded_columns: tl.tensor,
    ignore_index: tl.tensor,
    smoothing: tl.tensor,
    z_loss: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    rows = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    label = tl.load(labels_ptr + rows, mask=rows < num_rows, other=ignore_index)[:, None]
    lse = tl.load(lse_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
    row = rows[:, None]
    column = (tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < num_rows) & (column < padded_columns)
    x = tl.load(logits_ptr + row * padded_columns + column, mask=inside, other=0.0).to(tl.float32)
    gradient = exp2((x - lse) * LOG2_E) * (1.0 + 2.0 * z_loss * lse) - smoothing / num_columns
    gradient = tl.where(column == label, gradient - (1.0 - smoothing), gradient)
    gradient = tl.where((label != ignore_index) & (column < num_columns), gradient, 0.0)
    cast = (gradient * tl.load(scale_ptr)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * padded_columns + column, cast, mask=inside)
    # Cast once more, with a scale that the assembler cannot know to be the same: fp8_mlp's kernels say why.
    turned = (gradient * tl.load(same_scale_ptr)).to(turned_ptr.dtype.element_ty)
    tl.store(turned_ptr + column * num_rows + row, turned, mask=inside)


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
    """The gradient of the summed loss by the logits, times SCALE, and its transpose."""
    num_rows, padded = logits_cp.shape
    scale = torch.full((), SCALE, device=logits_cp.device)
    out = torch.empty(num_rows, padded, dtype=E5M2, device=logits_cp.device)
    turned = torch.empty(padded, num_rows, dtype=E5M2, device=logits_cp.device)
    grid = (triton.cdiv(num_rows, BLOCK), triton.cdiv(padded, BLOCK))
    fp8_logits_gradient_kernel[grid](
        logits_cp,
        labels_c,
        lse_c,
        scale,
        scale,
        out,
        turned,
        num_rows,
        vocab_size,
        padded,
        ignore_index,
        label_smoothing,
        z_loss,
        BLOCK=BLOCK,
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
    """As the function of this name of `triton.py`, for a weight that is aligned and hidden vectors of its dtype."""
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
        cross_entropy.forward(
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
    return losses_n, d_hidden_nd, d_weight_pd[:vocab_size]
