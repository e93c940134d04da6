"""How long a save keeps training waiting: the copy at most, never the disk, on one rank and on two."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

import pytest

from tests.parallel.rank_work import Result, on_ranks
from tests.parallel.save_work import save_often

MB = 2**20


def blocked(found: list[Result]) -> list[float]:
    """Of every save what the rank waited that waited longest."""
    return [
        max(save["blocked_s"] for save in saves) for saves in zip(*(r["saves"] for r in found), strict=True)
    ]


def took(found: list[Result]) -> float:
    return median(save["save_s"] for save in found[0]["saves"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{}, {"fsdp": 2}], ids=["one rank", "fsdp 2"])
def test_training_waits_for_less_than_5_per_cent_of_a_save_and_never_for_the_disk(
    layout: dict[str, int], tmp_path: Path
) -> None:
    count = layout.get("fsdp", 1)
    found: list[Result] = on_ranks(count, save_often, layout, str(tmp_path / "fast"), 3)
    held = sum(rank["saves"][0]["num_bytes"] for rank in found)
    wait_s, save_s = median(blocked(found)), took(found)
    slower: list[Result] = on_ranks(count, save_often, layout, str(tmp_path / "slow"), 2, 10 * save_s)
    sys.stdout.write(
        f"{count} rank(s), {held / MB:.0f} MB: training waited {wait_s * 1e3:.0f} ms of a save of {save_s:.2f} s "
        f"({wait_s / save_s:.1%}), and {min(blocked(slower)) * 1e3:.0f} ms of {took(slower):.1f} s on a slow disk\n"
    )
    assert held > 280 * MB
    assert wait_s < 0.05 * save_s
    assert took(slower) > 10 * save_s
    # The disk took ten saves longer, of which training felt nothing but what a busy machine does to a copy.
    assert min(blocked(slower)) < max(blocked(found)) + 0.1 * save_s
    at_once: list[Result] = on_ranks(count, save_often, layout, str(tmp_path / "at once"), 2, 0.0, False)
    for rank, later, plain in zip(found, slower, at_once, strict=True):
        assert all(save["in_background"] for save in rank["saves"])
        first, second, third = rank["places"]
        assert first == second == third, "memory is taken once"
        assert not plain["places"][0]
        assert later["digests"] == plain["digests"], "training changed what was being copied"
        assert rank["digests"].items() >= plain["digests"].items()
    assert len(at_once[0]["digests"]) == 4 * count
