# mypy: allow-untyped-decorators
"""The LM head and its cross-entropy in one: the summed loss from hidden vectors, without logits of all tokens.

The gradients are made in the forward pass, for those of `hidden` and `weight` that ask for one. hidden and
weight have one dtype (fp32, bf16 or fp16), in which the matmuls run. Under autocast they may have any: the
matmuls run in autocast's dtype, and each gradient has the dtype of its tensor, as with `torch.nn.functional`.
Extra memory is the logits of a chunk of tokens (by default at most 1/10 of all from 10,240 tokens on), and one copy
of the weight where it must be cast or padded. Bitwise repeatable where the matmuls are
(`torch.use_deterministic_algorithms`).
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from rush.kernels.cross_entropy import FLOATS, scaled_gradient
from rush.kernels.fp8_linear import ALIGNMENT, require_fp8_gpu
from rush.kernels.linear_cross_entropy import chunks
from rush.kernels.linear_cross_entropy.vocab_shard import Words
from rush.kernels.support import op, require, require_device

__all__ = ["Words", "linear_cross_entropy"]

# Shapes: n tokens, d hidden, v vocabulary.

ALONE = Words(first=0, whole=0, ranks=1, group="")
"""All words are here."""


def linear_cross_entropy(
    hidden: Tensor,
    weight_vd: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_tokens: int | None = None,
    words: Words | None = None,
    products: Literal["dtype", "fp8", "fp8_fast"] = "dtype",
) -> Tensor:
    """The fp32 sum of the losses of `hidden · weightᵀ` against the labels.

    hidden is [..., d], labels [...]; labels that are `ignore_index` cost nothing. With `z_loss` each row also pays
    z_loss · log²(Σ exp). `chunk_tokens` is how many tokens' logits exist at once; without it a few large chunks.

    `words`: the weight has some of a vocabulary's words, other processes the others. All call this with the same hidden
    vectors and labels, and get the loss over all words; the gradient of `hidden` is what the own words add to it.

    `products`: fp8 makes all three with 8-bit factors (see `fp8.py`), fp8_fast those of the gradients with the short
    accumulator too; on a GPU hidden vectors are bf16 then.
    """
    kind = hidden.device.type
    autocast = torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if autocast else hidden.dtype
    require_device("linear_cross_entropy", hidden, weight_vd, labels, has_cpu=products == "dtype")
    require(
        dtype in FLOATS and hidden.dtype in FLOATS and weight_vd.dtype in FLOATS,
        "linear_cross_entropy takes fp32, bf16 and fp16; convert other dtypes first.",
    )
    require(
        autocast or hidden.dtype == weight_vd.dtype,
        "linear_cross_entropy needs hidden vectors and weight in one dtype, or autocast to choose one.",
    )
    require(
        hidden.dim() > 1 and weight_vd.dim() == 2 and hidden.shape[-1] == weight_vd.shape[1] > 0,
        "linear_cross_entropy needs hidden vectors [..., width] and a weight [vocabulary, width].",
    )
    require(
        labels.shape == hidden.shape[:-1] and labels.dtype in (torch.int64, torch.int32),
        "linear_cross_entropy needs a label, int64 or int32, for each hidden vector.",
    )
    require(weight_vd.shape[0] > 0, "linear_cross_entropy needs a vocabulary.")
    require(0 <= label_smoothing < 1, "label_smoothing must be at least 0 and below 1.")
    require(z_loss >= 0, "z_loss must not be negative.")
    require(chunk_tokens is None or chunk_tokens > 0, "chunk_tokens must be positive.")
    require(
        words is None or not (label_smoothing or z_loss),
        "linear_cross_entropy over parts of a vocabulary knows neither label_smoothing nor z_loss.",
    )
    require(
        products in ("dtype", "fp8", "fp8_fast"),
        "linear_cross_entropy makes its products in dtype, fp8 or fp8_fast.",
    )
    hidden_nd = hidden.reshape(-1, hidden.shape[-1])
    chunk = chunks.default_chunk(hidden_nd.shape[0]) if chunk_tokens is None else chunk_tokens
    if products != "dtype":
        chunk = -(-chunk // ALIGNMENT) * ALIGNMENT if chunk_tokens is None else chunk
        _need_8_bits(hidden_nd, dtype, chunk, words)
    grad = torch.is_grad_enabled()
    loss: Tensor = _linear_cross_entropy(
        hidden_nd,
        weight_vd,
        labels.reshape(-1),
        dtype,
        chunk,
        ignore_index,
        float(label_smoothing),
        float(z_loss),
        grad and hidden.requires_grad,
        grad and weight_vd.requires_grad,
        *(words or ALONE),
        products,
    )[0]
    return loss


def _need_8_bits(hidden_nd: Tensor, dtype: torch.dtype, chunk_tokens: int, words: Words | None) -> None:
    """Refuse what the 8-bit products cannot be made of."""
    require(words is None, "linear_cross_entropy in fp8 needs all of the vocabulary in one place.")
    require(
        dtype == torch.bfloat16 or (dtype == torch.float32 and not hidden_nd.is_cuda),
        "linear_cross_entropy in fp8 takes bf16 (on a CPU fp32 too); convert hidden vectors, or run under autocast in bf16.",
    )
    require_fp8_gpu("linear_cross_entropy in fp8", hidden_nd)
    tokens, width = hidden_nd.shape
    parts = () if chunk_tokens >= tokens else (chunk_tokens,)
    require(
        all(size % ALIGNMENT == 0 for size in (tokens, width, *parts)),
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
    label_smoothing: float,
    z_loss: float,
    want_hidden: bool,
    want_weight: bool,
    first_word: int,
    whole_vocabulary: int,
    ranks: int,
    group: str,
    products: str,
) -> tuple[Tensor, Tensor, Tensor]:
    # Inside, every dtype is chosen already.
    with torch.no_grad(), torch.autocast(hidden_nd.device.type, enabled=False):
        losses_n, d_hidden_nd, d_weight_vd = chunks.loss_and_gradients(
            hidden_nd,
            weight_vd,
            labels_n.contiguous(),
            dtype=dtype,
            chunk_tokens=chunk_tokens,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            want_hidden=want_hidden,
            want_weight=want_weight,
            words=Words(first_word, whole_vocabulary, ranks, group) if group else None,
            products=products,
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
    label_smoothing: float,
    z_loss: float,
    want_hidden: bool,
    want_weight: bool,
    first_word: int,
    whole_vocabulary: int,
    ranks: int,
    group: str,
    products: str,
) -> tuple[Tensor, Tensor, Tensor]:
    num_tokens, width = hidden_nd.shape
    hidden_dtype, weight_dtype = chunks.gradient_dtypes(dtype, num_tokens, chunk_tokens)
    return (
        hidden_nd.new_empty((), dtype=torch.float32),
        hidden_nd.new_empty((num_tokens if want_hidden else 0, width), dtype=hidden_dtype),
        weight_vd.new_empty((weight_vd.shape[0] if want_weight else 0, width), dtype=weight_dtype),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden_nd, weight_vd, _, dtype = inputs[:4]
    ctx.want_hidden, ctx.want_weight = inputs[8:10]
    _, d_hidden_nd, d_weight_vd = output
    ctx.factor = 1 / chunks.gradient_scale(dtype)
    ctx.dtypes = hidden_nd.dtype, weight_vd.dtype
    ctx.mark_non_differentiable(d_hidden_nd, d_weight_vd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(d_hidden_nd, d_weight_vd)


def _gradients(ctx: Any, upstream: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    nothing = (None,) * 13
    if upstream is None:
        return None, None, *nothing
    d_hidden_nd, d_weight_vd = ctx.saved_tensors
    hidden_dtype, weight_dtype = ctx.dtypes
    return (
        _scaled(d_hidden_nd, upstream, ctx.factor, hidden_dtype) if ctx.want_hidden else None,
        _scaled(d_weight_vd, upstream, ctx.factor, weight_dtype) if ctx.want_weight else None,
        *nothing,
    )


def _scaled(gradient: Tensor, upstream: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    return scaled_gradient(gradient, upstream.expand(gradient.shape[0]), factor, dtype)


_linear_cross_entropy.register_autograd(_gradients, setup_context=_keep)
