"""Many tensors in one launch: a table of addresses, and which program works on which part of which tensor.

A kernel's arguments are few and fixed when it is compiled; a model has hundreds of tensors of all sizes. So
the addresses go into a small tensor on the device, one row for each tensor, and the work is cut into pieces of
equal size: program i reads which tensor and which offset is its own, then the addresses. A tiny tensor costs
one program, a huge one thousands, and all of them are one launch.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Division:
    """For each program: the row of its tensor in the table, and its first element there."""

    rows: Tensor
    starts: Tensor


Divisions = MutableMapping[Any, Division]
"""How the work was cut before: kept by the caller, since it does not change from step to step."""


def divide(sizes: Sequence[int], piece: int, device: torch.device) -> Division:
    """Cut tensors of these sizes into pieces of at most `piece` elements."""
    pieces = torch.tensor([-(-size // piece) for size in sizes], dtype=torch.int64)
    rows = torch.repeat_interleave(torch.arange(len(sizes)), pieces)
    before = torch.cumsum(pieces, 0) - pieces
    starts = (torch.arange(len(rows)) - before[rows]) * piece
    return Division(rows.to(device=device, dtype=torch.int32), starts.to(device=device))


def division_of(
    use: str, sizes: tuple[int, ...], piece: int, device: torch.device, divisions: Divisions
) -> Division:
    """How tensors of these sizes are cut, as before or anew."""
    key = (use, device, sizes)
    if key not in divisions:
        divisions[key] = divide(sizes, piece, device)
    return divisions[key]


def table_of(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """The table on the device. The copy starts from pinned memory, so nothing waits for it."""
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True)


def aligned(addresses: Sequence[int], size: int) -> bool:
    """Whether a tensor can be read in vectors of 16 bytes, without a rest."""
    return size % 16 == 0 and all(address % 16 == 0 for address in addresses)
