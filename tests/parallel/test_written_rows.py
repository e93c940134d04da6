"""A large replicated tensor is written by all its holders, some rows each; no row by none, none by two."""

from __future__ import annotations

import pytest
import torch

from rush.parallel.placement import TensorShard, rows_of_box


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 13])
def test_each_row_of_a_shard_is_written_by_one_rank(rows: int, count: int) -> None:
    values = torch.arange(rows * 3).view(rows, 3)
    shard = TensorShard(values, (5, 0), (40, 3))
    parts = [rows_of_box(shard, index, count) for index in range(count)]
    assert torch.equal(torch.cat([part.values for part in parts]), values)
    begins = [part.offset[0] for part in parts]
    ends = [part.offset[0] + len(part.values) for part in parts]
    assert begins == [5, *ends[:-1]], "each begins where the one before it ends"
    assert ends[-1] == 5 + rows
    assert {part.full_shape for part in parts} == {(40, 3)}
