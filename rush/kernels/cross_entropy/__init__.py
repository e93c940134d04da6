# mypy: allow-untyped-decorators
"""Cross-entropy of rows of logits, with ignored labels, label smoothing and z-loss.

`cross_entropy` leaves the logits alone and makes their gradient in the backward pass. `cross_entropy_` writes
the gradient over the logits already in the forward pass, so that no second tensor of that size ever exists:
use it where nobody else needs the logits (if an earlier operation kept them for its own backward pass, torch
notices and raises).

Both take logits in fp32, bf16 or fp16 as they come, under autocast too, and compute in fp32. A label outside
the vocabulary gives a loss that is not a number. Bitwise repeatable.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from rush.kernels.cross_entropy import passes
from rush.kernels.support import op, require, require_device

__all__ = ["cross_entropy", "cross_entropy_"]

# Shapes: n rows, v columns (the vocabulary).

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
Reduction = Literal["sum", "none"]


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "sum",
) -> Tensor:
    """The fp32 loss, summed, or of each label (`reduction="none"`, in the labels' shape).

    Logits are [..., v], labels [...]. With `z_loss` each row also pays z_loss · log²(Σ exp).
    """
    _check(logits, labels, label_smoothing, z_loss, reduction)
    logits_nv = logits.reshape(-1, logits.shape[-1])
    losses_n = _cross_entropy(
        logits_nv, labels.reshape(-1), ignore_index, float(label_smoothing), float(z_loss)
    )[0]
    return _reduce(losses_n, labels, reduction)


def cross_entropy_(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "sum",
) -> Tensor:
    """As `cross_entropy`, but afterwards the logits hold the gradient of their row's loss. They must be dense."""
    _check(logits, labels, label_smoothing, z_loss, reduction)
    require(
        logits.is_contiguous(),
        "cross_entropy_ writes over its logits, so they must be contiguous; use cross_entropy for others.",
    )
    require(
        not (logits.requires_grad and logits.is_leaf and torch.is_grad_enabled()),
        "cross_entropy_ writes over its logits, which must not be a leaf that asks for a gradient; use cross_entropy.",
    )
    logits_nv = logits.view(-1, logits.shape[-1])
    settings = (ignore_index, float(label_smoothing), float(z_loss))
    losses_n: Tensor = _OverLogits.apply(logits_nv, labels.reshape(-1), *settings)  # type: ignore[no-untyped-call]
    return _reduce(losses_n, labels, reduction)


def _check(logits: Tensor, labels: Tensor, label_smoothing: float, z_loss: float, reduction: str) -> None:
    require_device("cross_entropy", logits, labels, has_cpu=True)
    require(
        logits.dtype in FLOATS,
        "cross_entropy takes logits in fp32, bf16 and fp16; convert other dtypes first.",
    )
    require(
        labels.dtype in (torch.int64, torch.int32),
        "cross_entropy takes labels as whole numbers, int64 or int32.",
    )
    require(
        logits.dim() > 1 and logits.shape[:-1] == labels.shape and logits.shape[-1] > 0,
        "cross_entropy needs logits [..., vocabulary] and a label for each row of them.",
    )
    require(0 <= label_smoothing < 1, "label_smoothing must be at least 0 and below 1.")
    require(z_loss >= 0, "z_loss must not be negative.")
    require(reduction in ("sum", "none"), 'reduction must be "sum" or "none".')


def _reduce(losses_n: Tensor, labels: Tensor, reduction: str) -> Tensor:
    return losses_n.sum() if reduction == "sum" else losses_n.view(labels.shape)


def _rows(logits_nv: Tensor) -> Tensor:
    return logits_nv if logits_nv.stride(-1) == 1 else logits_nv.contiguous()


@op("cross_entropy")
def _cross_entropy(
    logits_nv: Tensor, labels_n: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    losses_n, lse_n = (logits_nv.new_empty(len(labels_n), dtype=torch.float32) for _ in range(2))
    passes.forward(
        _rows(logits_nv),
        labels_n.contiguous(),
        losses_n,
        lse_n,
        num_columns=logits_nv.shape[1],
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )
    return losses_n, lse_n


@_cross_entropy.register_fake
def _(
    logits_nv: Tensor, labels_n: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    losses_n, lse_n = (logits_nv.new_empty(labels_n.shape[0], dtype=torch.float32) for _ in range(2))
    return losses_n, lse_n


@op("cross_entropy_backward")
def _cross_entropy_backward(
    upstream_n: Tensor,
    logits_nv: Tensor,
    labels_n: Tensor,
    lse_n: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    out_nv = logits_nv.new_empty(logits_nv.shape)
    passes.backward(
        _rows(logits_nv),
        labels_n.contiguous(),
        lse_n,
        upstream_n,
        out_nv,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )
    return out_nv


@_cross_entropy_backward.register_fake
def _(
    upstream_n: Tensor,
    logits_nv: Tensor,
    labels_n: Tensor,
    lse_n: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    return logits_nv.new_empty(logits_nv.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits_nv, labels_n, *ctx.settings = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits_nv, labels_n, output[1])


def _gradients(ctx: Any, upstream_n: Tensor | None, _: Any) -> tuple[Tensor | None, None, None, None, None]:
    if upstream_n is None:
        return None, None, None, None, None
    return _cross_entropy_backward(upstream_n, *ctx.saved_tensors, *ctx.settings), None, None, None, None


_cross_entropy.register_autograd(_gradients, setup_context=_keep)


@op("cross_entropy_in_place", mutates=("logits_nv",))
def _cross_entropy_in_place(
    logits_nv: Tensor, labels_n: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> Tensor:
    losses_n = logits_nv.new_empty(len(labels_n), dtype=torch.float32)
    passes.forward(
        logits_nv,
        labels_n.contiguous(),
        losses_n,
        None,
        num_columns=logits_nv.shape[1],
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
    )
    return losses_n


@_cross_entropy_in_place.register_fake
def _(
    logits_nv: Tensor, labels_n: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> Tensor:
    return logits_nv.new_empty(labels_n.shape[0], dtype=torch.float32)


@op("scale_rows", mutates=("x_nd",))
def _scale_rows(x_nd: Tensor, scales_n: Tensor, factor: float) -> None:
    passes.scale_rows(x_nd, scales_n, factor)


@_scale_rows.register_fake
def _(x_nd: Tensor, scales_n: Tensor, factor: float) -> None:
    return None


def scaled_gradient(gradient_nd: Tensor, scales_n: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """A gradient made before its scale was known, times that scale: in place where nothing stands in the way.

    A compiler that traces this gets plain arithmetic, which it writes over the old tensor by itself.
    """
    tracing = torch.compiler.is_compiling() or type(gradient_nd) is not Tensor
    if gradient_nd.dtype == dtype and not tracing:
        _scale_rows(gradient_nd, scales_n, factor)
        return gradient_nd
    return (gradient_nd.float() * (scales_n * factor)[:, None]).to(dtype)


class _OverLogits(torch.autograd.Function):
    """The gradient takes the place of the logits, and waits there for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_nv: Tensor,
        labels_n: Tensor,
        ignore_index: int,
        label_smoothing: float,
        z_loss: float,
    ) -> Tensor:
        losses_n: Tensor = _cross_entropy_in_place(logits_nv, labels_n, ignore_index, label_smoothing, z_loss)
        ctx.save_for_backward(logits_nv)
        return losses_n

    @staticmethod
    def backward(ctx: Any, upstream_n: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient_nv,) = ctx.saved_tensors
        return (
            scaled_gradient(gradient_nv, upstream_n, 1.0, gradient_nv.dtype),
            None,
            None,
            None,
            None,
        )
