"""The number by which replicas are compared depends on every bit and on its place."""

from __future__ import annotations

import pytest
import torch

from rush.parallel.replica_check import row_of


def number(tensor: torch.Tensor) -> int:
    return int(row_of(7, tensor)[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("shape", [(6, 5), (12,), (2, 3, 4)])
def test_replicas_that_differ_in_a_bit_or_in_the_order_of_rows_differ(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = (torch.arange(torch.Size(shape).numel()) + 1).view(shape).to(dtype)
    assert number(tensor) == number(tensor.clone())
    assert number(tensor) != number(tensor.flip(0)), "the same rows in another order"
    other = tensor.clone()
    other.view(torch.uint8).flatten()[3] ^= 1
    assert number(tensor) != number(other)
