"""The LM head and its loss, a chunk of tokens at a time, with the gradients made on the way.

For a chunk of tokens: one matmul makes its logits in a buffer, the cross-entropy kernel reads them and writes
their gradient over them, and two more matmuls turn that into the gradient of the chunk's hidden vectors and a
part of the weight's gradient. Then the next chunk uses the same buffer. So the only tensor with the vocabulary
as a side (besides the weight and its gradient) is a chunk's, and each product is made once: three matmuls in
all, as with full logits. (Chunks that are recomputed in the backward pass need four.) The backward pass has
nothing left to do but multiply by the gradient that comes from above.

The matmuls are the library's: at these shapes it runs near the chip's limit. What chunks cost is that the
weight's gradient is read and written once for each, so they must be few and large. What they bring beside
memory is that the logits go through the loss while they are warm.

Rounding. In bf16 the weight's gradient is a sum over chunks that is rounded after each: the error grows with
the root of their number, so from MOST_ROUNDED chunks on it is kept in fp32. fp16 has too small a range for
either end: a probability below 6e-8 is lost, a sum over thousands of tokens can pass 65504. So there the
logits' gradient is written times FP16_SCALE, both results are fp32, and the backward pass divides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rush.kernels.cross_entropy import passes
from rush.kernels.linear_cross_entropy.vocab_shard import Words, losses_among

# Shapes: n tokens, d hidden, v vocabulary (padded to a multiple of ALIGNED inside), c tokens of a chunk.

ALIGNED = 64
"""Tensor cores want sides that are multiples of 8, tiles better of 64; GPT-2's 50,257 words are an odd number."""
FEWEST = 4
ROUND = (1024, 1536, 2048, 4096, 8192, 16384)
"""Tokens of a chunk that make the library's products fast (on an H200, widths 768 to 4096, docs/negative-results.md): from
1,024 on arithmetic limits them and not reading the weight, and these fill the last wave of tiles."""
SHARE = 10
"""A chunk's logits are at most this part of all, where there are enough tokens."""
MOST_ROUNDED = 16
FP16_SCALE = 1024.0
SLICE = 4096
"""Rows of the weight whose fp32 gradient is made at once where the sum is kept in fp32: small enough for the cache."""


def default_chunk(num_tokens: int) -> int:
    """Tokens of a chunk: few chunks, none larger than need be."""
    chunks = max(num_tokens // ROUND[0], FEWEST)
    if num_tokens >= SHARE * ROUND[0]:
        size = max(size for size in ROUND if size * SHARE <= num_tokens)
        if size * MOST_ROUNDED >= num_tokens:
            return size
        chunks = MOST_ROUNDED  # more would cost a sum in fp32
    tokens = -(-num_tokens // chunks)
    return max(1, -(-tokens // 128) * 128 if tokens > 128 else tokens)


def gradient_scale(dtype: torch.dtype) -> float:
    """What both gradients are multiplied by, for matmuls in this dtype."""
    return FP16_SCALE if dtype == torch.float16 else 1.0


def gradient_dtypes(
    dtype: torch.dtype, num_tokens: int, chunk_tokens: int
) -> tuple[torch.dtype, torch.dtype]:
    """In which the gradients of hidden vectors and weight are kept until the backward pass, given that of the matmuls."""
    if dtype != torch.bfloat16:
        return torch.float32, torch.float32
    chunks = -(-num_tokens // chunk_tokens)
    return torch.bfloat16, torch.bfloat16 if chunks <= MOST_ROUNDED else torch.float32


def loss_and_gradients(
    hidden_nd: Tensor,
    weight_vd: Tensor,
    labels_n: Tensor,
    *,
    dtype: torch.dtype,
    chunk_tokens: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    want_hidden: bool,
    want_weight: bool,
    words: Words | None = None,
    products: str = "dtype",
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses, and the gradients of their sum times `gradient_scale` (empty where they are not wanted).

    Matmuls run in `dtype`. The results' dtypes are those of `gradient_dtypes`. Where the weight has some of the `words`,
    the losses are those over all of them, and the gradients what these words add.
    """
    (num_tokens, width), vocab_size = hidden_nd.shape, weight_vd.shape[0]
    weight_pd = _aligned(weight_vd, dtype)
    chunk_tokens = max(1, min(chunk_tokens, num_tokens))
    hidden_dtype, weight_dtype = gradient_dtypes(dtype, num_tokens, chunk_tokens)
    if products != "dtype":
        from rush.kernels.linear_cross_entropy import fp8

        losses_n, d_hidden_nd, d_weight_vd = fp8.loss_and_gradients(
            hidden_nd.to(dtype),
            weight_pd,
            labels_n,
            vocab_size=vocab_size,
            chunk_tokens=chunk_tokens,
            weight_dtype=weight_dtype,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            want_hidden=want_hidden,
            want_weight=want_weight,
            fast=products == "fp8_fast",
        )
        return losses_n, d_hidden_nd.to(hidden_dtype), d_weight_vd
    logits_cp = weight_pd.new_empty(chunk_tokens, weight_pd.shape[0])
    losses_n = hidden_nd.new_empty(num_tokens, dtype=torch.float32)
    d_hidden_nd = hidden_nd.new_empty((num_tokens, width) if want_hidden else (0, width), dtype=hidden_dtype)
    d_weight_pd = weight_pd.new_empty(weight_pd.shape if want_weight else (0, width), dtype=weight_dtype)
    if want_weight and num_tokens == 0:
        d_weight_pd.zero_()
    # Only where a gradient is wanted is it written over the logits; otherwise this takes the place of one number a row.
    lse_c = None if want_hidden or want_weight else losses_n.new_empty(chunk_tokens)
    for first in range(0, num_tokens, chunk_tokens):
        here = slice(first, first + chunk_tokens)
        chunk_cd = hidden_nd[here].to(dtype)
        part_cp = logits_cp[: len(chunk_cd)]
        torch.mm(chunk_cd, weight_pd.t(), out=part_cp)
        if words is None:
            passes.forward(
                part_cp,
                labels_n[here],
                losses_n[here],
                lse_c,
                num_columns=vocab_size,
                ignore_index=ignore_index,
                label_smoothing=label_smoothing,
                z_loss=z_loss,
                gradient_scale=gradient_scale(dtype),
            )
        else:
            # Columns of padding are zero and stay so.
            scale = None if lse_c is not None else gradient_scale(dtype)
            losses_n[here] = losses_among(words, part_cp[:, :vocab_size], labels_n[here], ignore_index, scale)
        if want_hidden:
            _product(part_cp, weight_pd, d_hidden_nd[here])
        if want_weight:
            _add_product(part_cp, chunk_cd, d_weight_pd, first=first == 0)
    return losses_n, d_hidden_nd, d_weight_pd[:vocab_size]


def _aligned(weight_vd: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in the matmuls' dtype, with rows of zeros below it where its height is no round number."""
    vocab_size, width = weight_vd.shape
    padded = -(-vocab_size // ALIGNED) * ALIGNED
    if padded == vocab_size:
        return weight_vd.to(dtype).contiguous()
    weight_pd = weight_vd.new_empty(padded, width, dtype=dtype)
    weight_pd[:vocab_size].copy_(weight_vd)
    weight_pd[vocab_size:].zero_()
    return weight_pd


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(_fp32_product(left, right))


def _add_product(part_cp: Tensor, chunk_cd: Tensor, out_pd: Tensor, first: bool) -> None:
    """Add partᵀ · chunk to the weight's gradient; the first chunk finds nothing there yet."""
    if out_pd.dtype == part_cp.dtype:
        if first:
            torch.mm(part_cp.t(), chunk_cd, out=out_pd)
        else:
            torch.addmm(out_pd, part_cp.t(), chunk_cd, out=out_pd)
        return
    for start in range(0, len(out_pd), SLICE):
        rows = slice(start, start + SLICE)
        product = _fp32_product(part_cp[:, rows].t(), chunk_cd)
        if first:
            out_pd[rows].copy_(product)
        else:
            out_pd[rows].add_(product)


def _fp32_product(left: Tensor, right: Tensor) -> Tensor:
    """A product of 16-bit factors whose sum is not rounded to 16 bits."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    # The CPU knows no such product; there, in tests, the exact one stands in for it.
    return torch.mm(left.double(), right.double()).float()
