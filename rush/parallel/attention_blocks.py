"""Attention of a chunk of queries to a chunk of keys, by several kernels: the blocks of ring attention.

A block returns its output and the log-sum-exp (lse) of each query's scores. The backward pass of a block takes the output and
lse over *all* blocks, so that the gradients of the blocks add up.

Shapes: b rows, h query heads, k key/value heads, n queries, m keys, d head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class BlockKernel(NamedTuple):
    """Attention of a chunk of queries to a chunk of keys."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    """(q, k, v, causal, visible) -> output, lse [b, h, n]. `visible` [b, n, m] masks other documents; a query that sees
    nothing gets 0."""
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    """(do, q, k, v, o, lse, causal, visible) -> dq, dk, dv of this block; o and lse are those of all blocks."""


def _masked(q: Tensor, k: Tensor, causal: bool, visible: Tensor | None) -> Tensor | None:
    """The mask of scores that do not count [1 or b, 1, n, m]."""
    hidden = None if visible is None else ~visible[:, None]
    if causal:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)[None, None]
        hidden = later if hidden is None else hidden | later
    return hidden


def _scores(q: Tensor, k: Tensor, causal: bool, visible: Tensor | None) -> Tensor:
    scores: Tensor = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).float()
    hidden = _masked(q, k, causal, visible)
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


def _repeated(q: Tensor, *shared: Tensor) -> list[Tensor]:
    """Key/value heads repeated for every query head."""
    return [x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in shared]


def _summed(k: Tensor, *gradients: Tensor) -> list[Tensor]:
    """The gradients of key/value heads, summed over their query heads."""
    return [x.view(x.shape[0], k.shape[1], -1, *x.shape[2:]).sum(2) for x in gradients]


def plain_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    k, v = _repeated(q, k, v)
    scores = _scores(q, k, causal, visible)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return weights.to(v.dtype) @ v, lse


def plain_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, visible: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    k_all, v_all = _repeated(q, k, v)
    weights = torch.exp(_scores(q, k_all, causal, visible) - lse[..., None])
    dv = weights.to(do.dtype).transpose(-1, -2) @ do
    dscores = (do @ v_all.transpose(-1, -2)).float() - (do.float() * o.float()).sum(-1, keepdim=True)
    ds = (weights * dscores * q.shape[-1] ** -0.5).to(q.dtype)
    dk, dv = _summed(k, ds.transpose(-1, -2) @ q, dv)
    return ds @ k_all, dk, dv


def cpu_flash_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    hidden = None if visible is None else _masked(q, k, causal, visible)
    bias = None if hidden is None else torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -math.inf)
    o, lse = flash(q, *_repeated(q, k, v), 0.0, causal and bias is None, attn_mask=bias)
    return o, lse if hidden is None else lse.masked_fill(hidden.all(-1), -math.inf)


def cpu_flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, visible: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    hidden = None if visible is None else _masked(q, k, causal, visible)
    bias = None if hidden is None else torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -math.inf)
    # The operator wants lse contiguous over heads.
    lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    k_all, v_all = _repeated(q, k, v)
    dq, dk, dv = flash(do, q, k_all, v_all, o, lse, 0.0, causal and bias is None, attn_mask=bias)
    return dq, *_summed(k, dk, dv)


def cuda_flash_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    assert visible is None, "torch's flash operator takes no mask"
    o, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
    return o, lse


def cuda_flash_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, visible: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_backward
    seed = _no_seed(q)
    found: tuple[Tensor, Tensor, Tensor] = flash(
        do, q, k, v, o, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed
    )
    return found


def cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    assert visible is None, "torch's cuDNN operator takes no mask here"
    o, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, *_repeated(q, k, v), None, True, 0.0, causal
    )
    return o, lse.reshape(q.shape[:3])


def cudnn_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, visible: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    seed, (k_all, v_all) = _no_seed(q), _repeated(q, k, v)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        do, q, k_all, v_all, o, lse[..., None].contiguous(), seed, seed, None, None, None, q.shape[2], k.shape[2], 0.0, causal
    )  # fmt: skip
    return dq, *_summed(k, dk, dv)


def triton_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, visible: Tensor | None
) -> tuple[Tensor, Tensor]:
    assert visible is None, "the kernel supports documents in full rows only"
    o, lse2 = torch.ops.rush.flash_attention_forward(q, k, v, None, None, causal, q.shape[-1] ** -0.5)
    return o, lse2 * math.log(2)


def triton_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, visible: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.rush.flash_attention_backward(
        do, q, k, v, o, (lse / math.log(2)).contiguous(), None, None, causal, q.shape[-1] ** -0.5
    )
    return found


def _no_seed(q: Tensor) -> Tensor:
    """The random state that an operator takes and ignores without dropout."""
    return torch.zeros(2, dtype=torch.int64, device=q.device)


KERNELS = {
    "plain": BlockKernel(plain_forward, plain_backward),
    "flash on cpu": BlockKernel(cpu_flash_forward, cpu_flash_backward),
    "flash on cuda": BlockKernel(cuda_flash_forward, cuda_flash_backward),
    "cudnn": BlockKernel(cudnn_forward, cudnn_backward),
    "triton": BlockKernel(triton_forward, triton_backward),
}
