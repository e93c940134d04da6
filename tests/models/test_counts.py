from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rush.models import (
    SIZES,
    Shape,
    build_model,
    count_parameters,
    flops_per_token,
    matmul_parameters,
    parameter_table,
)
from rush.models.counts import list_parameters

PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-350m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
    "smollm3-3b": 3_075_098_624,
    "granite-3.3-2b": 2_533_539_840,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str) -> None:
    assert count_parameters(SIZES[name]) == PUBLISHED[name]


@pytest.mark.parametrize("name", SIZES)
def test_the_list_of_parameters_is_the_module(name: str) -> None:
    with torch.device("meta"):
        model = build_model(SIZES[name])
    assert all(parameter.is_meta for parameter in model.parameters())
    found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert found == {spec.name: spec.dims for spec in list_parameters(SIZES[name])}
    assert sum(parameter.numel() for parameter in model.parameters()) == count_parameters(SIZES[name])


@pytest.mark.parametrize("name", SIZES)
def test_matmul_parameters_are_those_of_the_linear_layers_by_role(name: str) -> None:
    shape = SIZES[name]
    with torch.device("meta"):
        roles = build_model(shape).linears()
    linears = [linear for members in roles.values() for _, linear in members]
    assert matmul_parameters(shape) == sum(linear.weight.numel() for linear in linears)
    assert len({id(linear) for linear in linears}) == len(linears)


def test_the_table_folds_layers_and_adds_up(small_shape: Shape) -> None:
    rows = parameter_table(small_shape)
    assert sum(row.parameters for row in rows) == count_parameters(small_shape)
    assert sum(row.matmul_parameters for row in rows) == matmul_parameters(small_shape)
    down = next(row for row in rows if row.name == "blocks.*.mlp.down.weight")
    assert down.copies == small_shape.num_layers
    assert down.dims == (small_shape.hidden, small_shape.intermediate)
    assert down.role == "mlp_down"
    assert any(row.role == "head" for row in rows)


@pytest.mark.parametrize("name", ["tiny", "llama-tiny", "qwen3-tiny", "olmo2-tiny", "granite-tiny"])
def test_flops_per_token_equal_a_count_of_the_operations_that_run(name: str) -> None:
    """torch counts the matmuls of a real forward and backward pass.

    The plain model computes the whole square of scores, twice what causality needs, so its count is
    the formula with 12 in place of 6 for attention.
    """
    shape, batch, sequence = SIZES[name], 2, 48
    model = build_model(shape)
    tokens = torch.arange(batch * sequence).reshape(batch, sequence)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    causal_half = 6 * shape.num_layers * shape.num_heads * shape.head_dim * sequence
    assert counter.get_total_flops() == batch * sequence * (flops_per_token(shape, sequence) + causal_half)


def test_flops_of_gpt2_agree_with_the_known_figure() -> None:
    """124M at 1024: 6 x (84.9M of blocks + 38.6M of head) + 6 x 12 x 768 x 1024."""
    assert flops_per_token(SIZES["gpt2-124m"], 1024) == 6 * (84_934_656 + 38_597_376) + 56_623_104


def test_windows_shorten_attention() -> None:
    """Counted pair by pair: a query sees its window, less at the start of the row."""
    shape, sequence = SIZES["mistral-tiny"], 512
    pairs = sum(min(query + 1, 64) for query in range(sequence))
    found = flops_per_token(shape, sequence) - 6 * matmul_parameters(shape)
    width = shape.num_heads * shape.head_dim
    assert found == pytest.approx(12 * shape.num_layers * width * pairs / sequence, rel=0.01)
    without = flops_per_token(SIZES["llama-tiny"], 512) - 6 * matmul_parameters(SIZES["llama-tiny"])
    assert found < 0.25 * without
