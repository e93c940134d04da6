from __future__ import annotations

import torch

from rush.lab.parity import FOLDED, fold


def test_a_folded_difference_is_as_long_as_the_difference() -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(300, 1000, generator=generator)
    second = first + 0.03 * torch.randn(300, 1000, generator=generator)
    one, other = fold(first, "some.weight"), fold(second, "some.weight")
    assert one.shape == (FOLDED,)
    true = float((second - first).norm() / first.norm())
    folded = float((other - one).norm() / one.norm())
    assert (
        abs(folded / true - 1) < 4 * (2 / FOLDED) ** 0.5
    )  # two lengths, each known to 1/√(2·FOLDED), fourfold
    assert torch.equal(one, fold(first, "some.weight"))
    assert not torch.equal(one, fold(first, "another.weight"))


def test_folding_misses_no_value() -> None:
    values = torch.zeros(2 * 1024 * FOLDED + 7)
    for place in (0, FOLDED, 1024 * FOLDED, 2 * 1024 * FOLDED + 6):
        values.zero_()
        values[place] = 3.0
        assert float(fold(values, "w").abs().sum()) == 3.0
