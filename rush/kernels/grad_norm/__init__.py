# mypy: allow-untyped-decorators
"""The global gradient norm of a list of tensors, for clipping, in one launch.

torch computes a norm per tensor (`torch._foreach_norm`, one launch per twenty million elements) and the norm of those.
Here all tensors share one launch, as in `adamw`. Always in fp32: a bf16 norm has three digits. Takes contiguous fp32 and
bf16 tensors. Deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rush.kernels.adamw.table import Division, Divisions, aligned, division_of, table_of
from rush.kernels.adamw.update import DTYPES
from rush.kernels.grad_norm import triton as kernels
from rush.kernels.support import op, require, require_device

__all__ = ["grad_norm"]


def grad_norm(tensors: Sequence[Tensor], divisions: Divisions | None = None) -> Tensor:
    """√Σ x² over all elements of all tensors, an fp32 scalar on their device. `divisions`: see `adamw_`."""
    require(len(tensors) > 0, "grad_norm needs at least one tensor.")
    require_device("grad_norm", *tensors)
    kinds: dict[tuple[torch.dtype, bool], list[Tensor]] = {}
    for tensor in tensors:
        require(tensor.dtype in DTYPES, f"grad_norm takes fp32 and bf16; found {tensor.dtype}.")
        require(tensor.is_contiguous(), "grad_norm needs contiguous tensors.")
        if tensor.numel():
            kind = tensor.dtype, aligned([tensor.data_ptr()], tensor.numel())
            kinds.setdefault(kind, []).append(tensor.detach())
    squares = [
        _squares(members, *_divide(members, divisions), is_aligned)
        for (_, is_aligned), members in kinds.items()
    ]
    return torch.cat(squares).sum().sqrt() if squares else tensors[0].new_zeros((), dtype=torch.float32)


def _divide(tensors: list[Tensor], divisions: Divisions | None) -> tuple[Tensor, Tensor]:
    """Which program reads which piece of which tensor."""
    sizes = tuple(tensor.numel() for tensor in tensors)
    division = division_of(
        "norm", sizes, kernels.PIECE, tensors[0].device, {} if divisions is None else divisions
    )
    return division.rows, division.starts


@op("grad_norm")
def _squares(tensors: list[Tensor], rows: Tensor, starts: Tensor, is_aligned: bool) -> Tensor:
    return kernels.squares(table_of(tensors), Division(rows, starts), tensors[0].dtype, is_aligned)


@_squares.register_fake
def _(tensors: list[Tensor], rows: Tensor, starts: Tensor, is_aligned: bool) -> Tensor:
    return rows.new_empty(rows.shape, dtype=torch.float32)
