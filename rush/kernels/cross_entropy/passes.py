"""The passes over rows of logits, each by the kernel of where they are: on a CPU the one in C++, else Triton's.

Triton is imported where it is needed, so that a CPU does without it.

Shapes: n rows, v columns (the vocabulary), perhaps with columns of padding after them, d width.
"""

from __future__ import annotations

from torch import Tensor

from rush.kernels import cpu
from rush.kernels.support import uses_cpp


def forward(
    logits_nv: Tensor,
    labels_n: Tensor,
    losses_n: Tensor,
    lse_n: Tensor | None,
    *,
    num_columns: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    gradient_scale: float = 1.0,
) -> None:
    """Fill in the losses; and the logs of the softmax's denominators, or without a place for them the gradient over
    the logits. Columns from `num_columns` on are padding, whose gradient is zero."""
    if logits_nv.shape[0] == 0:
        return
    assert logits_nv.stride(1) == 1
    assert labels_n.is_contiguous()
    settings = (num_columns, ignore_index, label_smoothing, z_loss, gradient_scale)
    if uses_cpp(logits_nv):
        cpu.cross_entropy_forward(logits_nv, labels_n, losses_n, lse_n, *settings)
    else:
        from rush.kernels.cross_entropy import triton as kernels

        kernels.forward(logits_nv, labels_n, losses_n, lse_n, *settings)


def backward(
    logits_nv: Tensor,
    labels_n: Tensor,
    lse_n: Tensor,
    upstream_n: Tensor,
    out_nv: Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """The gradient of the logits, given that of each row's loss (perhaps one number for all: a stride of 0). It may be
    written over the logits."""
    if logits_nv.shape[0] == 0:
        return
    assert logits_nv.stride(1) == out_nv.stride(1) == 1
    settings = (ignore_index, label_smoothing, z_loss)
    if uses_cpp(logits_nv):
        cpu.cross_entropy_backward(logits_nv, labels_n, lse_n, upstream_n, out_nv, *settings)
    else:
        from rush.kernels.cross_entropy import triton as kernels

        kernels.backward(logits_nv, labels_n, lse_n, upstream_n, out_nv, *settings)


def scale_rows(x_nd: Tensor, scales_n: Tensor, factor: float) -> None:
    """Multiply each row by its scale and a common factor, in fp32, in place; rows whose product is 1 are not touched.

    The scale is read on the device, so nothing waits for it.
    """
    if x_nd.shape[0] == 0:
        return
    assert x_nd.stride(1) == 1
    if uses_cpp(x_nd):
        x_nd.mul_((scales_n * factor)[:, None])
    else:
        from rush.kernels.cross_entropy import triton as kernels

        kernels.scale_rows(x_nd, scales_n, factor)
