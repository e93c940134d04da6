# mypy: allow-untyped-decorators
"""Cross-entropy of rows of logits, with ignored labels.

`cross_entropy` leaves the logits unchanged and computes their gradient in the backward pass. `cross_entropy_`
overwrites the logits with the gradient in the forward pass, so no second tensor of that size is allocated: use it
where nothing else needs the logits (if an earlier operation saved them for its backward, autograd raises).

Both take logits in fp32, bf16 or fp16, under autocast too, and compute in fp32. A label outside the vocabulary gives
a NaN loss. Deterministic.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from rush.kernels.cross_entropy import passes
from rush.kernels.support import FLOATS, op, require, require_device

__all__ = ["cross_entropy", "cross_entropy_"]

# Shapes: n rows, v columns (the vocabulary).

Reduction = Literal["sum", "none"]


def cross_entropy(
    logits: Tensor, labels: Tensor, *, ignore_index: int = -100, reduction: Reduction = "sum"
) -> Tensor:
    """The fp32 loss of logits [..., v] and labels [...]: summed, or per label (`reduction="none"`)."""
    _check(logits, labels, reduction)
    logits_nv = logits.reshape(-1, logits.shape[-1])
    losses_n = _cross_entropy(logits_nv, labels.reshape(-1), ignore_index)[0]
    return _reduce(losses_n, labels, reduction)


def cross_entropy_(
    logits: Tensor, labels: Tensor, *, ignore_index: int = -100, reduction: Reduction = "sum"
) -> Tensor:
    """As `cross_entropy`, but the logits, which must be contiguous, are overwritten with their gradient."""
    _check(logits, labels, reduction)
    require(
        logits.is_contiguous(),
        "cross_entropy_ overwrites its logits, so they must be contiguous; use cross_entropy for others.",
    )
    require(
        not (logits.requires_grad and logits.is_leaf and torch.is_grad_enabled()),
        "cross_entropy_ overwrites its logits, which must not be a leaf that requires grad; use cross_entropy.",
    )
    logits_nv = logits.view(-1, logits.shape[-1])
    losses_n: Tensor = _InPlace.apply(logits_nv, labels.reshape(-1), ignore_index)  # type: ignore[no-untyped-call]
    return _reduce(losses_n, labels, reduction)


def _check(logits: Tensor, labels: Tensor, reduction: str) -> None:
    require_device("cross_entropy", logits, labels, has_cpu=True)
    require(
        logits.dtype in FLOATS,
        "cross_entropy takes logits in fp32, bf16 and fp16; convert other dtypes first.",
    )
    require(labels.dtype in (torch.int64, torch.int32), "cross_entropy takes integer labels, int64 or int32.")
    require(
        logits.dim() > 1 and logits.shape[:-1] == labels.shape and logits.shape[-1] > 0,
        "cross_entropy needs logits [..., vocabulary] and a label for each row of them.",
    )
    require(reduction in ("sum", "none"), 'reduction must be "sum" or "none".')


def _reduce(losses_n: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return losses_n.sum() if reduction == "sum" else losses_n.view(labels.shape)


def _rows(logits_nv: Tensor) -> Tensor:
    return logits_nv if logits_nv.stride(-1) == 1 else logits_nv.contiguous()


@op("cross_entropy")
def _cross_entropy(logits_nv: Tensor, labels_n: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    losses_n, lse_n = (logits_nv.new_empty(len(labels_n), dtype=torch.float32) for _ in range(2))
    passes.forward(
        _rows(logits_nv),
        labels_n.contiguous(),
        losses_n,
        lse_n,
        num_columns=logits_nv.shape[1],
        ignore_index=ignore_index,
    )
    return losses_n, lse_n


@_cross_entropy.register_fake
def _(logits_nv: Tensor, labels_n: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    losses_n, lse_n = (logits_nv.new_empty(labels_n.shape[0], dtype=torch.float32) for _ in range(2))
    return losses_n, lse_n


@op("cross_entropy_backward")
def _cross_entropy_backward(
    upstream_n: Tensor, logits_nv: Tensor, labels_n: Tensor, lse_n: Tensor, ignore_index: int
) -> Tensor:
    out_nv = logits_nv.new_empty(logits_nv.shape)
    passes.backward(
        _rows(logits_nv), labels_n.contiguous(), lse_n, upstream_n, out_nv, ignore_index=ignore_index
    )
    return out_nv


@_cross_entropy_backward.register_fake
def _(upstream_n: Tensor, logits_nv: Tensor, labels_n: Tensor, lse_n: Tensor, ignore_index: int) -> Tensor:
    return logits_nv.new_empty(logits_nv.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits_nv, labels_n, ctx.ignore_index = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits_nv, labels_n, output[1])


def _backward(ctx: Any, upstream_n: Tensor | None, _: Any) -> tuple[Tensor | None, None, None]:
    if upstream_n is None:
        return None, None, None
    return _cross_entropy_backward(upstream_n, *ctx.saved_tensors, ctx.ignore_index), None, None


_cross_entropy.register_autograd(_backward, setup_context=_setup_context)


@op("cross_entropy_in_place", mutates=("logits_nv",))
def _cross_entropy_in_place(logits_nv: Tensor, labels_n: Tensor, ignore_index: int) -> Tensor:
    losses_n = logits_nv.new_empty(len(labels_n), dtype=torch.float32)
    passes.forward(
        logits_nv,
        labels_n.contiguous(),
        losses_n,
        None,
        num_columns=logits_nv.shape[1],
        ignore_index=ignore_index,
    )
    return losses_n


@_cross_entropy_in_place.register_fake
def _(logits_nv: Tensor, labels_n: Tensor, ignore_index: int) -> Tensor:
    return logits_nv.new_empty(labels_n.shape[0], dtype=torch.float32)


@op("scale_rows", mutates=("x_nd",))
def _scale_rows(x_nd: Tensor, scales_n: Tensor, factor: float) -> None:
    passes.scale_rows(x_nd, scales_n, factor)


def scaled_gradient(gradient_nd: Tensor, scales_n: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """The gradient times its upstream gradient and a factor: in place where the dtype allows.

    While tracing it is plain arithmetic, which the compiler makes in-place itself.
    """
    tracing = torch.compiler.is_compiling() or type(gradient_nd) is not Tensor
    if gradient_nd.dtype == dtype and not tracing:
        _scale_rows(gradient_nd, scales_n, factor)
        return gradient_nd
    return (gradient_nd.float() * (scales_n * factor)[:, None]).to(dtype)


class _InPlace(torch.autograd.Function):
    """The gradient overwrites the logits and is saved for the backward pass."""

    @staticmethod
    def forward(ctx: Any, logits_nv: Tensor, labels_n: Tensor, ignore_index: int) -> Tensor:
        losses_n: Tensor = _cross_entropy_in_place(logits_nv, labels_n, ignore_index)
        ctx.save_for_backward(logits_nv)
        return losses_n

    @staticmethod
    def backward(ctx: Any, upstream_n: Tensor) -> tuple[Tensor, None, None]:
        (gradient_nv,) = ctx.saved_tensors
        return scaled_gradient(gradient_nv, upstream_n, 1.0, gradient_nv.dtype), None, None
