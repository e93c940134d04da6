"""The passes over rows of logits: C++ on a CPU, Triton elsewhere.

Triton is imported on first use, so that a CPU works without it.

Shapes: n rows, v columns (the vocabulary), perhaps followed by padding columns, d width.
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
    gradient_scale: float = 1.0,
) -> None:
    """Write the losses and each row's logsumexp; with `lse_n` None, overwrite the logits with their gradient instead.

    Columns from `num_columns` on are padding, with zero gradient.
    """
    if logits_nv.shape[0] == 0:
        return
    assert logits_nv.stride(1) == 1
    assert labels_n.is_contiguous()
    settings = (num_columns, ignore_index, gradient_scale)
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
) -> None:
    """The gradient of the logits, given that of each row's loss (stride 0 for one value). `out_nv` may be the logits."""
    if logits_nv.shape[0] == 0:
        return
    assert logits_nv.stride(1) == out_nv.stride(1) == 1
    if uses_cpp(logits_nv):
        cpu.cross_entropy_backward(logits_nv, labels_n, lse_n, upstream_n, out_nv, ignore_index)
    else:
        from rush.kernels.cross_entropy import triton as kernels

        kernels.backward(logits_nv, labels_n, lse_n, upstream_n, out_nv, ignore_index)


def scale_rows(x_nd: Tensor, scales_n: Tensor, factor: float) -> None:
    """Multiply each row by its scale and a common factor, in fp32, in place; rows scaled by 1 are not written.

    The scale is read on the device: no synchronization.
    """
    if x_nd.shape[0] == 0:
        return
    assert x_nd.stride(1) == 1
    if uses_cpp(x_nd):
        x_nd.mul_((scales_n * factor)[:, None])
    else:
        from rush.kernels.cross_entropy import triton as kernels

        kernels.scale_rows(x_nd, scales_n, factor)
