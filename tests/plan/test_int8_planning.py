"""int8 matmuls in plans: rates by datasheet, time and memory, and the search on GPUs without fp8."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rush.plan.effects import WORK
from rush.plan.layout_search import can_add, search
from rush.plan.memory import working_bytes
from rush.plan.planning import plan, unmet
from rush.plan.spec import Spec, matmul_dtypes_of, spec_of
from rush.plan.target import DERATING, target_of
from rush.recipe_io import load_recipe

RESULTS = Path(__file__).resolve().parents[2] / "results"
INT8 = "techniques+=int8_matmul"
# int8 over 16 bits, by datasheet
RATIOS = {"a100-80-sxm": 2, "l40s": 2, "4090": 4, "5090": 4}


def spec(*overrides: str, name: str = "llama-3.1-8b-fast") -> Spec:
    return spec_of(load_recipe(name, [*overrides, "batch.micro=2", "batch.total_tokens=65536"]))


@pytest.mark.parametrize("machine", RATIOS)
def test_int8_matmuls_take_less_time_than_bf16_and_their_casts_more_than_that(machine: str) -> None:
    target = target_of(machine)
    assert target.peaks["int8"] == pytest.approx(RATIOS[machine] * target.peaks["bfloat16"], rel=0.02)
    assert target.matmul["int8"] == DERATING["int8"] * target.peaks["int8"]
    ours, plain = plan(spec(INT8), target), plan(spec(), target)
    assert ours.time.parts["matmul"] < plain.time.parts["matmul"]
    lost = ours.time.parts["elementwise"] - plain.time.parts["elementwise"]
    assert lost > plain.time.parts["matmul"] - ours.time.parts["matmul"]


def test_the_bytes_of_casts_are_those_of_the_measured_layer() -> None:
    record = json.loads((RESULTS / "kernels-int8-h200/kernels.json").read_text())
    rates = record["ceilings"]
    for row in record["ops"][0]["rows"]:
        if (row["contender"], row["step"]) != ("rush, compiled", "both"):
            continue
        casts_s = row["time_ms"]["median"] / 1e3 - row["flops"] / rates["matmul"]["int8"]
        elements = row["dims"]["tokens"] * (row["dims"]["inputs"] + row["dims"]["outputs"])
        planned = spec(INT8).work.number("blocks.casts")
        assert casts_s * rates["copy_bytes_per_s"] / elements == pytest.approx(planned, rel=0.05)


def test_an_h200_whose_int8_rate_was_not_measured_takes_it_from_the_datasheet_and_says_so() -> None:
    target = target_of("h200-sxm")
    assert target.matmul["int8"] == DERATING["int8"] * target.peaks["int8"]
    assert "int8 from the datasheet, derated" in target.sources[0]


def test_the_blocks_are_in_int8_and_the_lm_head_in_16_bits() -> None:
    assert matmul_dtypes_of(spec(INT8)) == ("int8", "bfloat16")
    assert {"blocks.dtype", "blocks.casts"} <= WORK.keys()


def test_int32_results_take_memory_beside_the_wide_gradients() -> None:
    assert working_bytes(spec(INT8)) - working_bytes(spec()) == 4 * spec().shape.intermediate


def test_a_search_tries_it_on_an_a100_and_says_what_it_loses_and_fp8_does_not_run_there() -> None:
    target = target_of("a100-80-sxm")
    found = search(load_recipe("llama-3.2-1b-fast"), target)
    assert not any(one.spec.uses("int8_matmul") or one.spec.uses("fp8") for one in found.best)
    assert any(" with int8_matmul: " in line and "for elementwise" in line for line in found.lost)


def test_a_search_tries_it_beside_fp8_only_where_its_units_are_faster() -> None:
    tried = {
        machine: {name for name in ("fp8", "int8_matmul") if can_add(name, {"compile"}, target_of(machine))}
        for machine in ("v100-32-sxm", "a100-80-sxm", "l40s", "h100-sxm", "4090", "5090")
    }
    both = {"fp8", "int8_matmul"}
    assert tried == {
        "v100-32-sxm": set(),
        "a100-80-sxm": {"int8_matmul"},
        "l40s": {"fp8"},
        "h100-sxm": {"fp8"},
        "4090": both,
        "5090": both,
    }
    assert not can_add("int8_matmul", set(), target_of("a100-80-sxm")), "without a compiler"


def test_a_plan_for_an_older_gpu_names_what_is_missing() -> None:
    recipe = load_recipe("llama-3.2-1b-fast", [INT8])
    assert any(
        one.startswith("int8_matmul: it needs an NVIDIA GPU of compute capability 8.0")
        for one in unmet(recipe, target_of("t4"))
    )
    assert not any(one.startswith("int8_matmul") for one in unmet(recipe, target_of("a100-80-sxm")))
