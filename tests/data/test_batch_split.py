"""A micro batch in pieces is the micro batch: every row, label, name and padding token once."""

from __future__ import annotations

import pytest
import torch

from rush.data.batch import Batch


def batch_of(rows: int, *, paired: bool = False) -> Batch:
    tokens = torch.arange(rows * 4).view(rows, 4)
    names = [f"row {row}" for row in range(rows)]
    return Batch(tokens, tokens + 1, names, padding=5, paired=paired, reference_b=torch.arange(rows).float())


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_the_pieces_of_a_batch_are_the_batch(parts: int) -> None:
    whole = batch_of(4)
    pieces = whole.split(parts)
    for name, tensor in whole.tensors().items():
        assert torch.equal(torch.cat([piece.tensors()[name] for piece in pieces]), tensor), name
    assert [name for piece in pieces for name in piece.samples] == list(whole.samples)
    assert sum(piece.padding for piece in pieces) == whole.padding
    assert sum(piece.num_real for piece in pieces) == whole.num_real


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_pieces_of_pairs_are_pairs(parts: int) -> None:
    whole = batch_of(6, paired=True)
    pieces = whole.split(parts)
    for name, tensor in whole.tensors().items():
        chosen = torch.cat([piece.tensors()[name].chunk(2)[0] for piece in pieces])
        rejected = torch.cat([piece.tensors()[name].chunk(2)[1] for piece in pieces])
        assert torch.equal(torch.cat([chosen, rejected]), tensor), name
    assert sum(piece.padding for piece in pieces) == whole.padding
    assert all(piece.paired for piece in pieces)
