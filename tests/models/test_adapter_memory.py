"""What adapters beside a frozen base take, by part: against counts made by hand, and the 70B shape on two cards."""

from __future__ import annotations

import pytest

from rush.models.adapter_memory import adapter_memory, part_bytes
from rush.models.counts import count_parameters
from rush.models.quantized_formats import Form
from rush.models.shape import SIZES

NF4 = Form("nf4", "bitsandbytes")
CARD = 24 * 2**30


def test_a_piece_of_a_tensor_is_that_of_the_first_rank() -> None:
    assert [part_bytes((5, 3), 2, ranks) for ranks in (1, 2, 4, 8)] == [30, 18, 12, 6]


def test_a_plain_base_on_one_rank_is_its_parameters() -> None:
    shape = SIZES["llama-3.2-1b"]
    told = adapter_memory(shape, rank=8, roles="qv")
    assert told.base == 2 * count_parameters(shape)
    # Queries are 2048 wide, values 512: rank 8 beside each, in 16 layers.
    assert told.adapters == told.gradients == 2 * 16 * 8 * (2 * 2048 + 2048 + 512)
    assert told.moments == 6 * told.adapters
    assert told.gathered == told.unpacked == 0
    assert told.total > told.base + told.adapters


def test_the_70b_shape_on_two_cards_of_24_gib_needs_the_host() -> None:
    shape = SIZES["llama-3.1-70b"]
    assert count_parameters(shape) == 70_553_706_496
    one, two, host = (
        adapter_memory(shape, form=NF4, ranks=ranks, offload=offload)
        for ranks, offload in ((1, False), (2, False), (2, True))
    )
    in_codes = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    # 4 bits, an 8-bit scale for 64, an fp32 scale for 256 of those; the rest in bf16.
    by_hand = in_codes * (0.5 + 1 / 64 + 4 / 64 / 256) + 2 * (70_553_706_496 - in_codes)
    assert one.base == pytest.approx(by_hand, rel=1e-4)
    assert two.base == pytest.approx(one.base / 2, rel=2e-3)
    assert one.total > CARD
    assert two.base < CARD < two.total
    assert host.total < CARD / 2
