"""What families add to Llama, sharded: norms of queries and keys, biases, norms after sublayers, windows, layers that differ."""

from __future__ import annotations

import numpy as np
import pytest

from rush.errors import MachineError
from rush.hardware import probe
from rush.techniques import check
from tests.parallel.rank_work import learn, on_ranks, recipe
from tests.parallel.test_sameness import furthest

WINDOWS = ("model.shape.window=9", "model.shape.window_layers=[true, false]")
CASES: list[tuple[str, dict[str, int], tuple[str, ...]]] = [
    ("qwen3-tiny", {"tp": 2}, ()),
    ("qwen2-tiny", {"tp": 2}, ()),
    ("gemma3-tiny", {"tp": 2}, ("model.shape.window=9",)),
    ("gemma2-tiny", {"tp": 2}, ("model.shape.window=9",)),
    ("granite-tiny", {"tp": 2}, ()),
    ("gemma3-tiny", {"pp": 2}, WINDOWS),
    ("smollm3-tiny", {"pp": 2}, ("model.shape.rope_layers=[true, false]",)),
    ("mistral-tiny", {"cp": 2}, ("model.shape.window=9",)),
    ("gemma2-tiny", {"cp": 2}, ("model.shape.window=9",)),
    ("olmo2-tiny", {"fsdp": 2}, ()),
]


@pytest.mark.parametrize(
    ("size", "layout", "more"),
    [pytest.param(*case, marks=() if case == CASES[0] else pytest.mark.slow) for case in CASES],
)
def test_a_family_learns_the_same_on_two_ranks(
    size: str, layout: dict[str, int], more: tuple[str, ...]
) -> None:
    named = (f"model.name={size}", *more)
    reference = on_ranks(1, learn, "llama", {}, (), 2, "", named)[0]
    for ours in on_ranks(int(np.prod(list(layout.values()))), learn, "llama", layout, (), 2, "", named):
        apart = furthest(ours, reference)
        assert max(apart.values()) < 1e-5, apart


def test_heads_that_are_normalized_together_are_not_sharded() -> None:
    with pytest.raises(MachineError, match="normalizes all queries of a token together.*use fsdp, pp or cp"):
        check(recipe("llama", {"tp": 2}, (), "model.name=olmo2-tiny"), probe("cpu"))
