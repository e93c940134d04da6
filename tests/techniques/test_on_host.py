"""What waits on the host comes back as it was."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from rush.techniques.memory.on_host import PIECE, OffloadToHost

MAKE = {
    "dense": lambda whole: whole,
    "heads before positions": lambda whole: whole.transpose(1, 2),
    "a part of a wider row": lambda whole: whole[..., :5],
    "repeated": lambda whole: whole[:, :1].expand(-1, 4, -1, -1),
}


@pytest.mark.parametrize("how", MAKE)
def test_a_saved_activation_comes_back_with_its_values_and_its_strides(how: str) -> None:
    whole = torch.randn(2, 7, 4, 8, requires_grad=True)
    moved: Counter[str] = Counter()
    with OffloadToHost(lambda tensor: True, moved, pin=False):
        view: Tensor = MAKE[how](whole)
        out = view * view
    back = out.grad_fn._saved_self  # type: ignore[union-attr]
    torch.testing.assert_close(back, view, rtol=0, atol=0)
    assert moved["bytes"] == 2 * view.numel() * 4
    if how != "repeated":  # what was expanded has its elements now
        # A compiled backward pass was made for these strides and takes no others.
        assert back.stride() == view.stride()


def test_an_activation_offloaded_in_pieces_is_restored() -> None:
    large = torch.arange(PIECE // 4 + 3, dtype=torch.float32).requires_grad_()
    with OffloadToHost(lambda tensor: True, Counter(), pin=False):
        out = large * large
    out.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(large.grad, 2 * large.detach(), rtol=0, atol=0)
