"""What ranks send each other: what can hide, what shares a server's cards, what crosses to the host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rush.hardware.links import LINKS, SERVERS
from rush.plan import spec_of, target_of
from rush.plan.communication import NETWORK, bandwidth, communication_time
from rush.plan.time import time_of
from rush.recipe_io import load_recipe

SLOW = target_of("a100-80-sxm", 8, 2, network="ethernet-10")
ONE = (
    'techniques=["pure_bf16", "flash_attention", "fused_adamw"]',
    "layout.ddp=16",
    "batch.micro=2",
    "batch.sequence=2048",
)


def test_once_per_step_communication_overlaps_with_the_last_backward_pass_only() -> None:
    one, four = (
        spec_of(load_recipe("llama-3.2-1b", [*ONE, f"batch.total_tokens={passes * 65536}"]))
        for passes in (1, 4)
    )
    assert (one.passes, four.passes) == (1, 4)
    assert communication_time(one, SLOW, 0.8) == communication_time(four, SLOW, 0.8), (
        "as much, however many passes"
    )
    exposed = [time_of(spec, SLOW).parts["communication"] for spec in (one, four)]
    # All waiting for the slowest grows with what is computed; what is left of the exchange does not.
    assert exposed[1] == pytest.approx(exposed[0], rel=0.1)


@pytest.mark.parametrize("stage", ["parameters", "gradients"])
def test_replicas_of_shards_all_reduce_once_per_step(stage: str) -> None:
    shards = [
        f'techniques=["pure_bf16", "flash_attention", "fused_adamw", {{name = "fsdp", stage = "{stage}"}}]',
        "layout.ddp=4", "layout.fsdp=8", "batch.micro=1", "batch.sequence=4096",
    ]  # fmt: skip
    once, often = (
        spec_of(load_recipe("llama-3.1-8b", [*shards, f"batch.total_tokens={n * 131072}"])) for n in (1, 16)
    )
    target = target_of("a100-80-sxm", 8, 4, network="ethernet-25")
    assert communication_time(once, target, 0.8).late == communication_time(often, target, 0.8).late > 1.0


def test_rings_between_servers_share_the_cards_of_a_server() -> None:
    spec = spec_of(load_recipe("llama-3.2-1b", [*ONE, "batch.total_tokens=65536"]))
    each = NETWORK * LINKS["ethernet-10"].bytes_per_s
    consumer = target_of("4090", 8, 2)
    assert SERVERS["4090"].cards == 1
    assert bandwidth(spec, consumer, "ddp", 0.8) == pytest.approx(each)
    assert bandwidth(spec, SLOW, "ddp", 0.8) == pytest.approx(8 * each), "a card for each accelerator"
    assert bandwidth(spec, target_of("4090", 8, 2, cards=4), "ddp", 0.8) == pytest.approx(4 * each)
    within = replace(spec, layout={**spec.layout, "ddp": 2, "tp": 8})
    assert bandwidth(within, SLOW, "ddp", 0.8) == pytest.approx(each), "eight rings, a card for each"
    assert bandwidth(within, consumer, "ddp", 0.8) == pytest.approx(each / 8)
    assert "1 network card a server" in " ".join(consumer.sources)


def test_an_offloaded_frozen_base_is_copied_in_forward_and_backward_of_every_pass() -> None:
    spec = spec_of(
        load_recipe(
            "qlora",
            ["model.name=llama-3.1-8b", 'techniques+={name = "fsdp", offload = true}', "layout.fsdp=2", "batch.micro=1",
             "batch.sequence=512", "batch.total_tokens=8192"],
        )
    )  # fmt: skip
    target = target_of("4090", 2)
    assert spec.passes == 8
    parts = time_of(spec, target).parts
    codes = 5.8e9 / 2  # of each rank
    assert parts["offload"] == pytest.approx(8 * 2 * codes / LINKS["pcie4"].bytes_per_s, rel=0.1)
    assert parts["optimizer"] < 0.2, "codes are not updated"
