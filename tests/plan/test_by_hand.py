"""The planner's bytes of a few plain recipes, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rush.hardware import probe
from rush.models import count_parameters
from rush.plan.efficiencies import DEFAULT
from rush.plan.memory import block_tensors, memory_of, stages_of
from rush.plan.optimizer_time import iteration_time
from rush.plan.spec import Spec, spec_of
from rush.plan.target import find_target
from rush.recipe_io import load_recipe
from rush.training.build import build
from tests.techniques.tiny_runs import recipe_of


def plain(*overrides: str) -> Spec:
    """Plain fp32 without any technique, with as few tokens as there can be: weights are the most of it."""
    return spec_of(
        load_recipe("gpt2-124m", ["techniques=[]", "batch.micro=1", "batch.sequence=8", "batch.total_tokens=8", *overrides]),
        "cpu",
    )  # fmt: skip


def test_a_parameter_takes_its_bytes_its_gradients_and_two_moments() -> None:
    spec = plain()
    count = count_parameters(spec.shape)
    found = memory_of(spec)
    assert found.parts["parameters"] == 4 * count
    assert found.parts["gradients"] == pytest.approx(4 * count, rel=1e-3)
    assert found.parts["optimizer"] == 8 * count


def test_with_adapters_only_they_have_gradients_and_moments() -> None:
    found = memory_of(plain("techniques=['lora']"))
    weights = found.parts["parameters"]
    assert found.parts["optimizer"] < 0.1 * weights
    assert found.parts.get("gradients", 0.0) < 0.1 * weights


def test_shards_hold_their_part_of_moments() -> None:
    spec = plain()
    count = count_parameters(spec.shape)
    for shards in (2, 4):
        found = memory_of(replace(spec, layout={**spec.layout, "fsdp": shards}))
        assert found.parts["optimizer"] == pytest.approx(8 * count / shards)


def test_muon_has_one_momentum_for_a_matrix_of_a_block_and_two_moments_for_all_the_rest() -> None:
    spec, width, layers = plain("techniques=['muon']"), 768, 12
    matrices = (
        layers * 12 * width * width
    )  # queries, keys, values, output, and an MLP of four widths, up and down
    found = memory_of(spec)
    assert found.parts["optimizer"] == 8 * count_parameters(spec.shape) - 4 * matrices
    sharded = memory_of(replace(spec, layout={**spec.layout, "fsdp": 4}))
    assert sharded.parts["optimizer"] == pytest.approx(found.parts["optimizer"] / 4)


@pytest.mark.parametrize("name", ["llama-tiny", "tiny"])
def test_what_muon_keeps_is_what_its_plan_says(name: str) -> None:
    recipe = recipe_of("muon", name=name)
    run = build(recipe, probe("cpu"))
    for parameter in run.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    run.optimizer.step()
    kept = [value for state in run.optimizer.state.values() for value in state.values() if value.dim()]
    assert memory_of(spec_of(recipe, "cpu")).parts["optimizer"] == sum(value.nbytes for value in kept)


def test_iterations_of_muon_are_shared_by_the_ranks_of_fsdp_and_repeated_by_replicas() -> None:
    spec, target = plain("techniques=['muon']"), find_target("h100-sxm")
    alone = iteration_time(spec, target, DEFAULT)
    width = 768
    square, wide = 2 * (2 + 1) * width**3, 2 * (2 * 4 + 1) * width**3
    flops = 5 * 12 * (4 * square + 2 * wide)
    assert alone == pytest.approx(flops / (target.rate("bfloat16") * DEFAULT.matmul.get("bfloat16", 1.0)))
    for axis, factor in (("fsdp", 0.25), ("ddp", 1.0), ("pp", 0.25)):
        several = replace(spec, layout={**spec.layout, axis: 4})
        assert iteration_time(several, target, DEFAULT) == pytest.approx(factor * alone)


@pytest.mark.parametrize("passes", [2, 4, 16])
def test_a_stage_of_1f1b_keeps_a_micro_batch_for_each_stage_after_it(passes: int) -> None:
    """Narayanan et al. 2021 (arXiv:2104.04473): stage r of p runs p − r forward passes before its first backward pass."""
    spec = replace(plain(), passes=passes)
    spec = replace(spec, layout={**spec.layout, "pp": 4})
    first, second, last = stages_of(spec)
    assert [stage.in_flight for stage in (first, second, last)] == [min(4, passes), min(3, passes), 1]
    assert [stage.blocks for stage in (first, second, last)] == [3, 3, 3]


def test_the_first_stage_holds_the_activations_of_all_micro_batches_in_flight() -> None:
    spec = plain("batch.sequence=1024", "batch.total_tokens=1024")
    spec = replace(spec, passes=16, layout={**spec.layout, "pp": 4})
    each = sum(block_tensors(spec).values()) * spec.tokens
    assert sum(memory_of(spec).activations.values()) == pytest.approx(3 * 4 * each)
