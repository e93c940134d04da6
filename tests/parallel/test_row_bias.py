"""The bias of a row-wise layer (GPT-2 has them): added once, with the gradient of all positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.rank_work import on_ranks
from tests.parallel.row_bias_work import example, plain_layer, row_wise


@pytest.mark.parametrize("sharded_stream", [True, False], ids=["own positions", "all positions"])
def test_the_bias_of_a_row_wise_layer_is_added_once_and_learns_from_all_positions(
    sharded_stream: bool,
) -> None:
    found: list[Any] = on_ranks(2, row_wise, sharded_stream)
    layer, (x, counts) = plain_layer(), example()
    out = layer(x)
    (out * counts).sum().backward()
    ours = [torch.tensor(rank["out"]) for rank in found]
    for whole in [torch.cat(ours, 1)] if sharded_stream else ours:
        torch.testing.assert_close(whole, out)
    for rank in found:
        assert rank["gradients"].keys() == {"weight", "bias"}
        for name, parameter in layer.named_parameters():
            torch.testing.assert_close(torch.tensor(rank["gradients"][name]), parameter.grad)
