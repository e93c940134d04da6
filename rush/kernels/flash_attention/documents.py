"""The first and last position of each position's document: the kernel's form of packed documents and windows.

Documents are runs of neighboring positions, so two integers per position replace a mask of
length × length, and the first and last of a tile's numbers decide which tiles it can skip. A sliding window needs no
more: a query's first key is at most a window away, and so is a key's last query.
"""

from __future__ import annotations

import torch
from torch import Tensor


def document_bounds(documents: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """First position and one past the last of every position's document, int32 [b, t].

    `documents` is either an id for every position [b, t], where a document is a run of one id (an id that
    comes back later in its row is another document), or the cumulative lengths [n + 1] of documents that lie
    one after the other in a single row: 0, the end of the first, …, the end of the last. Positions after the
    last end are one more document. Nothing waits for the device.
    """
    position_t = torch.arange(length, device=documents.device, dtype=torch.int32)
    if documents.dim() == 2:
        return _bounds_of_ids(documents, position_t)
    assert batch == 1, "cumulative lengths describe one row"
    ends = torch.cat((documents[1:].to(torch.int32), position_t[-1:] + 1))
    starts = documents.to(torch.int32)
    which_t = torch.searchsorted(documents[1:].to(torch.int32), position_t, right=True)
    return starts[which_t][None].contiguous(), ends[which_t][None].contiguous()


def window_bounds(
    first_bt: Tensor | None, last_bt: Tensor | None, window: int, q_bhtd: Tensor
) -> tuple[Tensor, Tensor]:
    """The bounds within documents (or whole rows) and a causal window: the first key that a query sees, and one past the
    last query that sees a key."""
    batch, _, length, _ = q_bhtd.shape
    position_t = torch.arange(length, device=q_bhtd.device, dtype=torch.int32)
    first_t, last_t = (position_t - (window - 1)).clamp(min=0), (position_t + window).clamp(max=length)
    if first_bt is None or last_bt is None:
        return first_t.expand(batch, -1).contiguous(), last_t.expand(batch, -1).contiguous()
    return torch.maximum(first_bt, first_t), torch.minimum(last_bt, last_t)


def _bounds_of_ids(documents_bt: Tensor, position_t: Tensor) -> tuple[Tensor, Tensor]:
    length = documents_bt.shape[1]
    # Whether a document begins between a position and the next.
    cut_bt = documents_bt[:, 1:] != documents_bt[:, :-1]
    begins_bt = torch.nn.functional.pad(cut_bt, (1, 0), value=True)
    ends_bt = torch.nn.functional.pad(cut_bt, (0, 1), value=True)
    first_bt = torch.cummax(torch.where(begins_bt, position_t, 0), dim=1).values
    last_bt = torch.cummin(torch.where(ends_bt, position_t + 1, length).flip(1), dim=1).values.flip(1)
    return first_bt.to(torch.int32), last_bt.to(torch.int32).contiguous()
