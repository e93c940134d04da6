"""A frozen base in parts, and what else stands beside sharding: N ranks do what one rank does with the same techniques."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
from rank_work import Result, learn, on_ranks, recipe
from shard_work import overfit, pass_adapters
from test_sameness import furthest

from rush.models.memory import adapter_memory
from rush.models.quantised import Form
from rush.train.overfit import NEAR_ZERO

NF4 = {backend: f"{{name='qlora', backend='{backend}'}}" for backend in ("bitsandbytes", "torchao")}
INT8 = {backend: f"{{name='int8_base', backend='{backend}'}}" for backend in ("bitsandbytes", "torchao")}
DORA = "{name='lora', variant='dora'}"
ZERO2, ZERO1 = "{name='fsdp', stage='gradients'}", "{name='fsdp', stage='optimizer'}"
BLOCKS = "{name='compile', scope='block'}"
FSDP, DDP, BOTH = {"fsdp": 2}, {"ddp": 2}, {"ddp": 2, "fsdp": 2}
slow = pytest.mark.slow

CASES = [
    pytest.param("llama", FSDP, (NF4["bitsandbytes"],), id="qlora"),
    pytest.param("gpt2", FSDP, ("lora",), marks=slow, id="lora, GPT-2"),
    pytest.param("llama", FSDP, ("lora", "{name='fsdp', unit='model'}"), marks=slow, id="lora, one unit"),
    pytest.param("llama", FSDP, (DORA,), marks=slow, id="dora"),
    pytest.param("gpt2", FSDP, (NF4["torchao"], ZERO2), marks=slow, id="qlora by torchao, ZeRO-2, GPT-2"),
    pytest.param("llama", FSDP, (NF4["bitsandbytes"], ZERO1), marks=slow, id="qlora, ZeRO-1"),
    pytest.param("llama", FSDP, ("{name='qlora', variant='dora'}",), marks=slow, id="qlora with dora"),
    pytest.param("llama", FSDP, (INT8["bitsandbytes"],), marks=slow, id="int8_base"),
    pytest.param("llama", FSDP, (INT8["torchao"],), marks=slow, id="int8_base by torchao"),
    pytest.param(
        "llama", BOTH, (NF4["bitsandbytes"], "checkpoint_full"), marks=slow, id="qlora, hybrid, checkpointing"
    ),
    pytest.param("llama", FSDP, (NF4["bitsandbytes"], BLOCKS), marks=slow, id="qlora, compiled"),
    pytest.param("llama", DDP, (NF4["bitsandbytes"],), marks=slow, id="qlora on copies"),
]


@cache
def one_rank(family: str, techniques: tuple[str, ...], steps: int) -> Result:
    alone = tuple(entry for entry in techniques if "'fsdp'" not in entry)
    found: Result = on_ranks(1, learn, family, {}, alone, steps)[0]
    return found


@pytest.mark.parametrize(("family", "layout", "techniques"), CASES)
def test_a_technique_beside_sharding_does_what_it_does_alone(
    request: pytest.FixtureRequest, family: str, layout: dict[str, int], techniques: tuple[str, ...]
) -> None:
    steps = 20 if request.node.get_closest_marker("slow") else 6
    reference = one_rank(family, techniques, steps)
    assert reference["losses"][-1] < 0.97 * reference["losses"][0], (
        "nothing was learned, so nothing is compared"
    )
    found = on_ranks(int(np.prod(list(layout.values()))), learn, family, layout, techniques, steps)
    for ours in found:
        apart = furthest(ours, reference)
        assert max(apart.values()) < 1e-5, apart
    assert all(took_effect for took_effect, _ in found[0]["proofs"].values()), found[0]["proofs"]


def test_a_quantised_base_in_two_parts_learns_a_batch_by_heart_in_the_bytes_that_were_foretold() -> None:
    changes = ("optimizer.lr=0.01", "batch.total_tokens=64")
    shape = recipe("llama", FSDP, (NF4["bitsandbytes"],), *changes).shape()
    for count, steps in ((1, 1), (2, 16)):
        layout = {"fsdp": count}
        first, *others = on_ranks(count, overfit, layout, (NF4["bitsandbytes"],), steps, changes)
        told = adapter_memory(
            shape, ranks=count, form=Form("nf4", "bitsandbytes"), weight_bytes=4, moment_bytes=8
        )
        assert (first["base"], first["trained"], first["moments"]) == (told.base, told.adapters, told.moments)
        for other in others:
            # The bytes are those of both, and of what every rank has: tables and scales of scales.
            assert 0.99 < other["base"] / first["base"] <= 1
            assert other["trained"] == first["trained"]
        for ours in (first, *others):
            assert (ours["losses"][-1] < NEAR_ZERO * ours["losses"][0]) == (steps > 1), ours["losses"]


@pytest.mark.parametrize("technique", [NF4["bitsandbytes"], pytest.param(DORA, marks=slow)])
def test_adapters_go_through_layouts_to_the_same_bits(tmp_path: Path, technique: str) -> None:
    def passed(layout: dict[str, int], source: str | None, steps: int, name: str) -> Result:
        count = int(np.prod(list(layout.values())))
        found: list[Result] = on_ranks(
            count, pass_adapters, layout, (technique,), source, str(tmp_path / name), steps
        )
        return found[0]

    first = passed(FSDP, None, 2, "sharded")
    alone = passed({}, first["path"], 0, "alone")
    last = passed(FSDP, alone["path"], 0, "last")
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert len({(Path(found["path"]) / file).read_bytes() for found in (first, alone, last)}) == 1, file
    states = [json.loads((Path(found["path"]) / "state.json").read_text()) for found in (first, alone, last)]
    assert states[0]["base"] == states[1]["base"] == states[2]["base"], "one base, whoever names it"
    assert all(".adapter." in name for name in load_file(Path(first["path"]) / "model.safetensors"))
    assert np.array_equal(first["logits"], last["logits"])
    assert np.abs(first["logits"]).max() > 0
