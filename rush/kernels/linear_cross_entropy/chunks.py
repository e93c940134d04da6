"""The LM head and its loss, one chunk of tokens at a time, with the gradients computed in the forward pass.

For each chunk one matmul writes the logits to a buffer, the cross-entropy kernel overwrites them with their gradient,
and two matmuls compute the gradient of the chunk's hidden states and its contribution to the weight's gradient. The next
chunk reuses the buffer. So only one chunk of logits exists at a time, and there are three matmuls, as with full logits.
(Recomputing chunks in the backward pass needs four.) The backward pass multiplies by the upstream gradient.

The matmuls are cuBLAS's, near peak at these shapes. Each chunk reads and writes the weight's gradient once, so chunks
must be few and large. Besides memory they save time: the loss reads logits that are still in L2.

Rounding. In bf16 the weight's gradient is rounded after each chunk: the error grows with the square root of their
number, so above MOST_ROUNDED chunks it is kept in fp32. fp16 has too small a range at both ends: a probability below
6e-8 underflows, a sum over thousands of tokens can exceed 65504. So the logits' gradient is written times FP16_SCALE,
both results are fp32, and the backward pass divides.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rush.kernels.cross_entropy import passes
from rush.kernels.linear_cross_entropy.vocab_shard import VocabShard, sharded_losses

# Shapes: n tokens, d hidden, v vocabulary (padded to a multiple of ALIGNED inside), c tokens of a chunk.

ALIGNED = 64
"""Tensor cores want sides that are multiples of 8, tiles better of 64; GPT-2's vocabulary of 50,257 is odd."""
FEWEST = 4
ROUND = (1024, 1536, 2048, 4096, 8192, 16384)
"""Chunk sizes that make cuBLAS matmuls fast (on an H200, widths 768 to 4096, docs/negative-results.md): from 1,024 on
they are compute-bound, and these fill the last wave of tiles."""
LEAST_CHUNKS = 10
"""With enough tokens, a chunk's logits are at most this fraction (1 / 10) of all."""
MOST_ROUNDED = 16
FP16_SCALE = 1024.0
SLICE = 4096
"""Rows of the weight whose fp32 gradient is computed at once where the sum is kept in fp32: small enough for L2."""


def default_chunk(num_tokens: int) -> int:
    """Tokens per chunk: few chunks, none larger than necessary."""
    chunks = max(num_tokens // ROUND[0], FEWEST)
    if num_tokens >= LEAST_CHUNKS * ROUND[0]:
        size = max(size for size in ROUND if size * LEAST_CHUNKS <= num_tokens)
        if size * MOST_ROUNDED >= num_tokens:
            return size
        chunks = MOST_ROUNDED  # more would need a sum in fp32
    tokens = -(-num_tokens // chunks)
    return max(1, -(-tokens // 128) * 128 if tokens > 128 else tokens)


def gradient_scale(dtype: torch.dtype) -> float:
    """The scale of both saved gradients, for matmuls in this dtype."""
    return FP16_SCALE if dtype == torch.float16 else 1.0


def gradient_dtypes(
    dtype: torch.dtype, num_tokens: int, chunk_tokens: int
) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of the saved gradients of hidden states and weight, given that of the matmuls."""
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
    hidden_grad: bool,
    weight_grad: bool,
    vocab_shard: VocabShard | None = None,
    matmuls: str = "dtype",
) -> tuple[Tensor, Tensor, Tensor]:
    """The losses, and the gradients of their sum times `gradient_scale` (empty where not required).

    Matmuls run in `dtype`; `gradient_dtypes` are those of the results. With a `vocab_shard` the losses are over the whole
    vocabulary, and the gradients are this shard's contribution.
    """
    (num_tokens, width), vocab_size = hidden_nd.shape, weight_vd.shape[0]
    weight_pd = _aligned(weight_vd, dtype)
    chunk_tokens = max(1, min(chunk_tokens, num_tokens))
    hidden_dtype, weight_dtype = gradient_dtypes(dtype, num_tokens, chunk_tokens)
    if matmuls != "dtype":
        from rush.kernels.linear_cross_entropy import fp8

        losses_n, d_hidden_nd, d_weight_vd = fp8.loss_and_gradients(
            hidden_nd.to(dtype),
            weight_pd,
            labels_n,
            vocab_size=vocab_size,
            chunk_tokens=chunk_tokens,
            weight_dtype=weight_dtype,
            ignore_index=ignore_index,
            hidden_grad=hidden_grad,
            weight_grad=weight_grad,
            fast_accum=matmuls == "fp8_fast",
        )
        return losses_n, d_hidden_nd.to(hidden_dtype), d_weight_vd
    logits_cp = weight_pd.new_empty(chunk_tokens, weight_pd.shape[0])
    losses_n = hidden_nd.new_empty(num_tokens, dtype=torch.float32)
    d_hidden_nd = hidden_nd.new_empty((num_tokens, width) if hidden_grad else (0, width), dtype=hidden_dtype)
    d_weight_pd = weight_pd.new_empty(weight_pd.shape if weight_grad else (0, width), dtype=weight_dtype)
    if weight_grad and num_tokens == 0:
        d_weight_pd.zero_()
    # The logits are overwritten only if a gradient is required; otherwise the kernel writes one logsumexp per row here.
    lse_c = None if hidden_grad or weight_grad else losses_n.new_empty(chunk_tokens)
    for first in range(0, num_tokens, chunk_tokens):
        here = slice(first, first + chunk_tokens)
        chunk_cd = hidden_nd[here].to(dtype)
        part_cp = logits_cp[: len(chunk_cd)]
        torch.mm(chunk_cd, weight_pd.t(), out=part_cp)
        if vocab_shard is None:
            passes.forward(
                part_cp,
                labels_n[here],
                losses_n[here],
                lse_c,
                num_columns=vocab_size,
                ignore_index=ignore_index,
                gradient_scale=gradient_scale(dtype),
            )
        else:
            # Padding columns stay zero.
            scale = None if lse_c is not None else gradient_scale(dtype)
            losses_n[here] = sharded_losses(
                vocab_shard, part_cp[:, :vocab_size], labels_n[here], ignore_index, scale
            )
        if hidden_grad:
            _mm(part_cp, weight_pd, d_hidden_nd[here])
        if weight_grad:
            _addmm_transposed(part_cp, chunk_cd, d_weight_pd, first=first == 0)
    return losses_n, d_hidden_nd, d_weight_pd[:vocab_size]


def _aligned(weight_vd: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in the matmuls' dtype, padded with rows of zeros to a multiple of ALIGNED."""
    vocab_size, width = weight_vd.shape
    padded = -(-vocab_size // ALIGNED) * ALIGNED
    if padded == vocab_size:
        return weight_vd.to(dtype).contiguous()
    weight_pd = weight_vd.new_empty(padded, width, dtype=dtype)
    weight_pd[:vocab_size].copy_(weight_vd)
    weight_pd[vocab_size:].zero_()
    return weight_pd


def _mm(left: Tensor, right: Tensor, out: Tensor) -> None:
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(_mm_fp32(left, right))


def _addmm_transposed(part_cp: Tensor, chunk_cd: Tensor, out_pd: Tensor, first: bool) -> None:
    """Add partᵀ · chunk to the weight's gradient; the first chunk overwrites it."""
    if out_pd.dtype == part_cp.dtype:
        if first:
            torch.mm(part_cp.t(), chunk_cd, out=out_pd)
        else:
            torch.addmm(out_pd, part_cp.t(), chunk_cd, out=out_pd)
        return
    for start in range(0, len(out_pd), SLICE):
        rows = slice(start, start + SLICE)
        update = _mm_fp32(part_cp[:, rows].t(), chunk_cd)
        if first:
            out_pd[rows].copy_(update)
        else:
            out_pd[rows].add_(update)


def _mm_fp32(left: Tensor, right: Tensor) -> Tensor:
    """A matmul of 16-bit operands with fp32 output."""
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    # torch has no such matmul on a CPU; float64 replaces it in tests.
    return torch.mm(left.double(), right.double()).float()
