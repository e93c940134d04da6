"""Exact attention in tiles: memory grows with the sequence, not with its square.

`flash_attention` is differentiable, deterministic (the same bits each time, forward and backward), and an
operator of its own to torch.compile. `triton.py` explains the kernels, `reference.py` is the definition.

Shapes: b batch, t positions, h query heads, k key/value heads, d head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rush.errors import KernelRefusal
from rush.kernels import cpu
from rush.kernels.flash_attention.documents import document_bounds, window_bounds
from rush.kernels.flash_attention.tiles import HEAD_DIMS
from rush.kernels.support import empty_bthd, op, require_device, uses_cpp

__all__ = ["document_bounds", "flash_attention"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def flash_attention(
    q_bhtd: Tensor,
    k_bktd: Tensor,
    v_bktd: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    documents: Tensor | tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ) v, where each query sees the keys up to its own (all of them if not `causal`).

    Several query heads may share a key/value head: h is a multiple of k, and neighboring query heads share.
    `scale` is 1/√d unless given. With a `window` it sees so many keys at most, its own and those before it (causal only). With
    `documents` a query sees its own document only, and nothing of another can
    change its output or gradients by a bit: ids [b, t] (a document is a run of one id), or the cumulative lengths
    [n + 1] of documents that lie one after the other in one row (0 first, t last), or, where several calls share
    them, what `document_bounds` made of either.

    The inputs are read in place, by their strides; the output's memory is [b, t, h, d]. They must be of one
    dtype, bf16, fp16 or fp32, and of one length: decoding with a KV cache is refused.
    Autocast does not act here: cast before. Softmax and accumulation are fp32; matmuls of 16-bit inputs have 16-bit
    operands; fp32 matmuls do not use tensor cores, so they are slow.
    """
    _check(q_bhtd, k_bktd, v_bktd)
    batch, _, length, head_dim = q_bhtd.shape
    scale = head_dim**-0.5 if scale is None else float(scale)
    if scale <= 0:
        raise KernelRefusal(f"flash_attention needs a positive scale, found {scale}.")
    first_bt = last_bt = None
    if isinstance(documents, tuple):
        first_bt, last_bt = documents
        _check_bounds(first_bt, last_bt, q_bhtd)
    elif documents is not None:
        _check_documents(documents, q_bhtd)
        first_bt, last_bt = document_bounds(documents, batch, length)
    if window is not None:
        if not causal or window < 1:
            raise KernelRefusal(
                f"flash_attention needs causal attention and a window of at least 1, found {window}."
            )
        first_bt, last_bt = window_bounds(first_bt, last_bt, window, q_bhtd)
    o_bhtd: Tensor = _forward(q_bhtd, k_bktd, v_bktd, first_bt, last_bt, causal, scale)[0]
    return o_bhtd


def _check(q_bhtd: Tensor, k_bktd: Tensor, v_bktd: Tensor) -> None:
    # Messages are formatted only on failure: torch.compile traces through this.
    require_device("flash_attention", q_bhtd, k_bktd, v_bktd, has_cpu=True)
    if wrong := _wrong_shapes(q_bhtd, k_bktd, v_bktd):
        raise KernelRefusal(
            f"flash_attention {wrong}; found queries {tuple(q_bhtd.shape)}, keys {tuple(k_bktd.shape)}, values "
            f"{tuple(v_bktd.shape)}."
        )
    if not (q_bhtd.dtype == k_bktd.dtype == v_bktd.dtype and q_bhtd.dtype in DTYPES):
        raise KernelRefusal(
            "flash_attention needs queries, keys and values in one of bfloat16, float16 and float32; found "
            f"{q_bhtd.dtype}, {k_bktd.dtype} and {v_bktd.dtype}. Cast them to one."
        )


def _wrong_shapes(q_bhtd: Tensor, k_bktd: Tensor, v_bktd: Tensor) -> str | None:
    if not q_bhtd.dim() == k_bktd.dim() == v_bktd.dim() == 4:
        return "takes [batch, heads, positions, head dim]"
    (batch, heads, length, head_dim), (kv_batch, kv_heads, kv_length, kv_dim) = q_bhtd.shape, k_bktd.shape
    if not (k_bktd.shape == v_bktd.shape and batch == kv_batch and head_dim == kv_dim):
        return "needs one batch size and one head dim, and as many values as keys"
    if length != kv_length:
        return "needs as many queries as keys (decoding with a cache uses the plain core)"
    if head_dim not in HEAD_DIMS:
        return f"supports head dims {', '.join(map(str, HEAD_DIMS))}"
    if min(batch, length, kv_heads, heads) < 1:
        return "needs at least one position of one head"
    if heads % kv_heads != 0:
        return "needs the query heads to be a multiple of the key/value heads"
    return None


def _check_documents(documents: Tensor, q_bhtd: Tensor) -> None:
    batch, _, length, _ = q_bhtd.shape
    require_device("flash_attention", q_bhtd, documents, has_cpu=True)
    if documents.is_floating_point() or documents.dtype == torch.bool:
        raise KernelRefusal(f"flash_attention takes documents as integers; found {documents.dtype}.")
    of_ids = documents.dim() == 2 and tuple(documents.shape) == (batch, length)
    of_lengths = documents.dim() == 1 and batch == 1 and documents.shape[0] >= 2
    if not (of_ids or of_lengths):
        raise KernelRefusal(
            f"flash_attention takes documents as ids {(batch, length)}, or for a single row as cumulative lengths "
            f"(0, …, {length}); found shape {tuple(documents.shape)} for a batch of {batch}."
        )


def _check_bounds(first_bt: Tensor, last_bt: Tensor, q_bhtd: Tensor) -> None:
    batch, _, length, _ = q_bhtd.shape
    require_device("flash_attention", q_bhtd, first_bt, last_bt, has_cpu=True)
    for bound in (first_bt, last_bt):
        if bound.dtype != torch.int32 or tuple(bound.shape) != (batch, length) or not bound.is_contiguous():
            raise KernelRefusal(
                f"flash_attention takes bounds of documents as two contiguous int32 tensors {(batch, length)}, as "
                f"document_bounds makes them; found {bound.dtype} {tuple(bound.shape)}."
            )


@op("flash_attention_forward")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor | None, last: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    if uses_cpp(q):
        return cpu.attention_forward(q, k, v, first, last, causal, scale)
    from rush.kernels.flash_attention import triton as kernels

    return kernels.forward(q, k, v, first, last, causal, scale)


@op("flash_attention_backward")
def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse2: Tensor,
    first: Tensor | None,
    last: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if uses_cpp(q):
        return cpu.attention_backward(do, q, k, v, lse2, first, last, causal, scale)
    from rush.kernels.flash_attention import triton as kernels

    return kernels.backward(do, q, k, v, o, lse2, first, last, causal, scale)


@_forward.register_fake  # type: ignore[untyped-decorator]
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_bthd(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@_backward.register_fake  # type: ignore[untyped-decorator]
def _(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return empty_bthd(q), empty_bthd(k), empty_bthd(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, first, last, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, first, last)


def _gradients(ctx: Any, do: Tensor, _: Tensor) -> tuple[Any, ...]:
    q, k, v, o, lse2, first, last = ctx.saved_tensors
    dq, dk, dv = _backward(do, q, k, v, o, lse2, first, last, ctx.causal, ctx.scale)
    return dq, dk, dv, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_setup_context)
