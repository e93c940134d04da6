"""A rank reads its own boxes of a tensor, wherever they begin in the pieces of those who wrote it; without any ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rush.checkpoint import reader, restore
from rush.checkpoint.reader import SavedTensors
from rush.parallel.placement import TensorShard
from rush.records.checkpoint_store import CheckpointStore, verify
from tests.checkpoint.pieces import cut_in_two

ROWS, COLUMNS, WIDTH = 8, 6, 3
"""Of the weight; and blocks in a row of it, for scales that were saved flat."""


@pytest.fixture
def saved(tmp_path: Path) -> SavedTensors:
    model = nn.Linear(COLUMNS, ROWS, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(2, COLUMNS)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["scales"] = torch.arange(ROWS * WIDTH, dtype=torch.float32)
    store = CheckpointStore(tmp_path / "checkpoints")
    path = cut_in_two(restore.save(store, 1, model, optimizer, {}), store, 2)
    return SavedTensors(verify(path), "optimizer")


def hold(monkeypatch: pytest.MonkeyPatch, *boxes: tuple[slice, slice]) -> None:
    """From now on this process holds these boxes of every matrix, as a rank would."""

    def shards(tensor: Tensor) -> list[TensorShard]:
        return [TensorShard(tensor[box], (box[0].start, box[1].start), tuple(tensor.shape)) for box in boxes]

    monkeypatch.setattr(reader, "local_shards", shards)


@pytest.mark.parametrize("rows", [(0, 8), (0, 3), (1, 4), (2, 7), (5, 6), (6, 8)])
@pytest.mark.parametrize("columns", [(0, 6), (2, 5)])
def test_any_box_of_a_tensor_in_pieces_is_that_of_the_whole(
    rows: tuple[int, int], columns: tuple[int, int], saved: SavedTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, box = saved["weight/exp_avg"], (slice(*rows), slice(*columns))
    hold(monkeypatch, box)
    tensor = torch.full_like(whole, torch.nan)
    saved.fill(tensor, "weight/exp_avg")
    assert torch.equal(tensor[box], whole[box])
    assert int(tensor.isnan().sum()) == tensor.numel() - whole[box].numel(), "and nothing else is touched"


@pytest.mark.parametrize("rows", [(0, 8), (2, 4), (5, 8)])
@pytest.mark.parametrize("columns", [(0, 3), (1, 3)])
def test_scales_that_were_saved_flat_come_back_at_the_rows_and_columns_of_the_rank(
    rows: tuple[int, int], columns: tuple[int, int], saved: SavedTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8-bit moments have a scale for each block: one line of numbers on one rank, a table by rows on several."""
    whole, box = saved["weight/scales"].view(ROWS, WIDTH), (slice(*rows), slice(*columns))
    hold(monkeypatch, box)
    table = torch.full((ROWS, WIDTH), torch.nan)
    saved.fill(table, "weight/scales", by_rows=True)
    assert torch.equal(table[box], whole[box])
    assert int(table.isnan().sum()) == table.numel() - whole[box].numel()
