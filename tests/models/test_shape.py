from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rush.errors import RecipeError
from rush.models import SIZES, RopeScaling, shape_of

GPT2, LLAMA = SIZES["tiny"], SIZES["llama-tiny"]


@pytest.mark.parametrize(
    ("base", "changes", "words"),
    [
        (GPT2, {"family": "gpt3"}, ("gpt3", "gpt2", "llama")),
        (GPT2, {"num_heads": 5, "num_kv_heads": 5}, ("num_heads", "5", "128")),
        (LLAMA, {"num_kv_heads": 3}, ("num_kv_heads", "3", "1, 2, 4")),
        (LLAMA, {"num_kv_heads": 8}, ("num_kv_heads", "8")),
        (GPT2, {"num_kv_heads": 2}, ("num_kv_heads", "llama")),
        (GPT2, {"head_dim": 16}, ("head_dim", "16", "32")),
        (GPT2, {"rope_theta": 10000.0}, ("GPT-2", "rope_theta")),
        (LLAMA, {"rope_theta": None}, ("rope_theta",)),
        (LLAMA, {"rope_theta": -1.0}, ("rope_theta", "-1.0")),
        (LLAMA, {"head_dim": 31}, ("head_dim", "31", "even")),
        (LLAMA, {"vocab_size": 0}, ("vocab_size", "0")),
        (LLAMA, {"num_layers": -2}, ("num_layers", "-2")),
        (LLAMA, {"hidden": 128.0}, ("hidden", "128.0")),
        (LLAMA, {"context": True}, ("context", "True")),
        (LLAMA, {"norm_eps": 0.0}, ("norm_eps",)),
        (LLAMA, {"norm_eps": float("nan")}, ("norm_eps", "nan")),
    ],
)
def test_an_impossible_shape_is_refused_with_what_was_found(
    base: Any, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(RecipeError) as caught:
        replace(base, **changes)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    "numbers", [(0.0, 1.0, 4.0, 8192), (8.0, 4.0, 1.0, 8192), (8.0, 1.0, 1.0, 8192), (8.0, 1.0, 4.0, 0)]
)
def test_an_impossible_rope_scaling_is_refused(numbers: tuple[float, float, float, int]) -> None:
    with pytest.raises(RecipeError, match="rope_scaling"):
        RopeScaling(*numbers)


def test_an_unknown_size_names_the_nearest_one() -> None:
    with pytest.raises(RecipeError, match=r"did you mean 'gpt2-124m'"):
        shape_of("gpt2-124")
    assert shape_of("gpt2-124m") is SIZES["gpt2-124m"]


def test_the_toy_shapes_are_what_recipes_promise() -> None:
    assert (GPT2.family, GPT2.num_layers, GPT2.hidden, GPT2.num_heads) == ("gpt2", 4, 128, 4)
    assert (GPT2.vocab_size, GPT2.context) == (2048, 256)
    assert (LLAMA.family, LLAMA.num_layers, LLAMA.hidden, LLAMA.num_heads) == ("llama", 4, 128, 4)
    assert (LLAMA.num_kv_heads, LLAMA.intermediate, LLAMA.vocab_size, LLAMA.context) == (2, 352, 2048, 512)
