# mypy: allow-untyped-decorators
"""Fused LM head and cross-entropy: the summed loss from hidden states, without the logits of all tokens.

The gradients of `hidden` and `weight` are computed in the forward pass, where they are required. Both have one dtype
(fp32, bf16 or fp16), in which the matmuls run. Under autocast they may have any: the matmuls run in autocast's dtype,
and each gradient has the dtype of its tensor. Extra memory is the logits of a chunk of tokens (by default at most 1/10
of all from 10,240 tokens on), and a copy of the weight where it must be cast or padded. Deterministic where the
matmuls are (`torch.use_deterministic_algorithms`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from rush.kernels.cross_entropy import scaled_gradient
from rush.kernels.fp8_linear import ALIGNMENT, require_fp8_gpu
from rush.kernels.linear_cross_entropy import chunks
from rush.kernels.linear_cross_entropy.vocab_shard import VocabShard
from rush.kernels.support import FLOATS, op, require, require_device

__all__ = ["VocabShard", "linear_cross_entropy"]

# Shapes: n tokens, d hidden, v vocabulary.

UNSHARDED = VocabShard(first=0, vocab_size=0, ranks=1, group="")


def linear_cross_entropy(
    hidden: Tensor,
    weight_vd: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    chunk_tokens: int | None = None,
    vocab_shard: VocabShard | None = None,
    matmuls: Literal["dtype", "fp8", "fp8_fast"] = "dtype",
) -> Tensor:
    """The fp32 sum of the losses of `hidden · weightᵀ` against the labels.

    hidden is [..., d], labels [...]; labels equal to `ignore_index` cost nothing. `chunk_tokens`: how many tokens' logits
    exist at once; by default a few large chunks.

    `vocab_shard`: the weight is this rank's shard of a vocabulary. All ranks call this with the same hidden states and
    labels and get the loss over the whole vocabulary; the gradient of `hidden` is this shard's contribution.

    `matmuls`: fp8 runs all three with fp8 operands (see `fp8.py`), fp8_fast those of the gradients with fast accumulation
    too; on a GPU hidden states must be bf16 then.
    """
    kind = hidden.device.type
    autocast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast else hidden.dtype
    require_device("linear_cross_entropy", hidden, weight_vd, labels, has_cpu=matmuls == "dtype")
    require(
        dtype in FLOATS and hidden.dtype in FLOATS and weight_vd.dtype in FLOATS,
        "linear_cross_entropy takes fp32, bf16 and fp16; convert other dtypes first.",
    )
    require(
        autocast or hidden.dtype == weight_vd.dtype,
        "linear_cross_entropy needs hidden states and weight in one dtype, or autocast to choose one.",
    )
    require(
        hidden.dim() > 1 and weight_vd.dim() == 2 and hidden.shape[-1] == weight_vd.shape[1] > 0,
        "linear_cross_entropy needs hidden states [..., width] and a weight [vocabulary, width].",
    )
    require(
        labels.shape == hidden.shape[:-1] and labels.dtype in (torch.int64, torch.int32),
        "linear_cross_entropy needs a label, int64 or int32, for each hidden state.",
    )
    require(weight_vd.shape[0] > 0, "linear_cross_entropy needs a vocabulary.")
    require(chunk_tokens is None or chunk_tokens > 0, "chunk_tokens must be positive.")
    require(
        matmuls in ("dtype", "fp8", "fp8_fast"),
        "linear_cross_entropy runs its matmuls in dtype, fp8 or fp8_fast.",
    )
    hidden_nd = hidden.reshape(-1, hidden.shape[-1])
    chunk = chunks.default_chunk(hidden_nd.shape[0]) if chunk_tokens is None else chunk_tokens
    if matmuls != "dtype":
        chunk = -(-chunk // ALIGNMENT) * ALIGNMENT if chunk_tokens is None else chunk
        _check_fp8(hidden_nd, dtype, chunk, vocab_shard)
    grad = torch.is_grad_enabled()
    loss: Tensor = _linear_cross_entropy(
        hidden_nd,
        weight_vd,
        labels.reshape(-1),
        dtype,
        chunk,
        ignore_index,
        grad and hidden.requires_grad,
        grad and weight_vd.requires_grad,
        *(vocab_shard or UNSHARDED),
        matmuls,
    )[0]
    return loss


def _check_fp8(hidden_nd: Tensor, dtype: torch.dtype, chunk_tokens: int, shard: VocabShard | None) -> None:
    require(shard is None, "linear_cross_entropy in fp8 needs the whole vocabulary on each rank.")
    require(
        dtype == torch.bfloat16 or (dtype == torch.float32 and not hidden_nd.is_cuda),
        "linear_cross_entropy in fp8 takes bf16 (on a CPU fp32 too); convert hidden states, or run under autocast in bf16.",
    )
    require_fp8_gpu("linear_cross_entropy in fp8", hidden_nd)
    tokens, width = hidden_nd.shape
    chunk = () if chunk_tokens >= tokens else (chunk_tokens,)
    require(
        all(size % ALIGNMENT == 0 for size in (tokens, width, *chunk)),
        f"linear_cross_entropy in fp8 needs tokens, those of a chunk and the width in multiples of {ALIGNMENT}.",
    )


@op("linear_cross_entropy")
def _linear_cross_entropy(
    hidden_nd: Tensor,
    weight_vd: Tensor,
    labels_n: Tensor,
    dtype: torch.dtype,
    chunk_tokens: int,
    ignore_index: int,
    hidden_grad: bool,
    weight_grad: bool,
    first_token: int,
    vocab_size: int,
    ranks: int,
    group: str,
    matmuls: str,
) -> tuple[Tensor, Tensor, Tensor]:
    # All dtypes are explicit below.
    with torch.no_grad(), torch.autocast(hidden_nd.device.type, enabled=False):
        losses_n, d_hidden_nd, d_weight_vd = chunks.loss_and_gradients(
            hidden_nd,
            weight_vd,
            labels_n.contiguous(),
            dtype=dtype,
            chunk_tokens=chunk_tokens,
            ignore_index=ignore_index,
            hidden_grad=hidden_grad,
            weight_grad=weight_grad,
            vocab_shard=VocabShard(first_token, vocab_size, ranks, group) if group else None,
            matmuls=matmuls,
        )
        return losses_n.sum(), d_hidden_nd, d_weight_vd


@_linear_cross_entropy.register_fake
def _(
    hidden_nd: Tensor,
    weight_vd: Tensor,
    labels_n: Tensor,
    dtype: torch.dtype,
    chunk_tokens: int,
    ignore_index: int,
    hidden_grad: bool,
    weight_grad: bool,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, width = hidden_nd.shape
    hidden_dtype, weight_dtype = chunks.gradient_dtypes(dtype, num_tokens, chunk_tokens)
    return (
        hidden_nd.new_empty((), dtype=torch.float32),
        hidden_nd.new_empty((num_tokens if hidden_grad else 0, width), dtype=hidden_dtype),
        weight_vd.new_empty((weight_vd.shape[0] if weight_grad else 0, width), dtype=weight_dtype),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden_nd, weight_vd, _, dtype = inputs[:4]
    ctx.hidden_grad, ctx.weight_grad = inputs[6:8]
    _, d_hidden_nd, d_weight_vd = output
    ctx.factor = 1 / chunks.gradient_scale(dtype)
    ctx.dtypes = hidden_nd.dtype, weight_vd.dtype
    ctx.mark_non_differentiable(d_hidden_nd, d_weight_vd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(d_hidden_nd, d_weight_vd)


def _backward(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 11
    if upstream is None:
        return None, None, *nothing
    d_hidden_nd, d_weight_vd = ctx.saved_tensors
    hidden_dtype, weight_dtype = ctx.dtypes
    return (
        _scaled(d_hidden_nd, upstream, ctx.factor, hidden_dtype) if ctx.hidden_grad else None,
        _scaled(d_weight_vd, upstream, ctx.factor, weight_dtype) if ctx.weight_grad else None,
        *nothing,
    )


def _scaled(gradient: Tensor, upstream: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    return scaled_gradient(gradient, upstream.expand(gradient.shape[0]), factor, dtype)


_linear_cross_entropy.register_autograd(_backward, setup_context=_setup_context)
