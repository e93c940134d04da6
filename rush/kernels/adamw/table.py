"""Multi-tensor launches: a table of addresses, and which program works on which piece of which tensor.

A kernel has a fixed number of arguments; a model has hundreds of tensors of all sizes. So the addresses go into a small
tensor on the device, one row per tensor, and the work is divided into pieces of equal size: program i reads its tensor
and offset, then the addresses. A tiny tensor costs one program, a huge one thousands, all in one launch.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Division:
    """For each program: the table row of its tensor, and its first element."""

    rows: Tensor
    starts: Tensor


Divisions = MutableMapping[Any, Division]
"""A cache, kept by the caller: divisions do not change from step to step."""


def divide(sizes: Sequence[int], piece: int, device: torch.device) -> Division:
    """Divide tensors of these sizes into pieces of at most `piece` elements."""
    pieces = torch.tensor([-(-size // piece) for size in sizes], dtype=torch.int64)
    rows = torch.repeat_interleave(torch.arange(len(sizes)), pieces)
    before = torch.cumsum(pieces, 0) - pieces
    starts = (torch.arange(len(rows)) - before[rows]) * piece
    return Division(rows.to(device=device, dtype=torch.int32), starts.to(device=device))


def division_of(
    use: str, sizes: tuple[int, ...], piece: int, device: torch.device, divisions: Divisions
) -> Division:
    """The cached or new division of tensors of these sizes."""
    key = (use, device, sizes)
    if key not in divisions:
        divisions[key] = divide(sizes, piece, device)
    return divisions[key]


def table_of(*columns: Sequence[Tensor], numbers: Sequence[int] | None = None) -> Tensor:
    """A row per tensor of the first column: the addresses of all columns, its size and its number, if they have one.

    Copied asynchronously from pinned memory.
    """
    first = columns[0]
    rows = [[*(x.data_ptr() for x in tensors), tensors[0].numel()] for tensors in zip(*columns, strict=True)]
    if numbers is not None:
        rows = [[*row, number] for row, number in zip(rows, numbers, strict=True)]
    device = first[0].device
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)


def aligned(addresses: Sequence[int], size: int) -> bool:
    """Whether a tensor can be read in 16-byte vectors without a remainder."""
    return size % 16 == 0 and all(address % 16 == 0 for address in addresses)
