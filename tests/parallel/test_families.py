"""What families add to Llama, sharded: norms of queries and keys, biases, norms after sublayers, windows, layers that differ."""

from __future__ import annotations

import pytest

from tests.parallel.rank_work import learn, on_ranks
from tests.parallel.test_sameness import furthest

WINDOWS = ("model.shape.window=9", "model.shape.window_layers=[true, false]")
CASES: list[tuple[str, dict[str, int], tuple[str, ...]]] = [
    ("qwen3-tiny", {"tp": 2}, ()),
    ("qwen2-tiny", {"tp": 2}, ()),
    ("gemma3-tiny", {"tp": 2}, ("model.shape.window=9",)),
    ("gemma2-tiny", {"tp": 2}, ("model.shape.window=9",)),
    ("granite-tiny", {"tp": 2}, ()),
    ("olmo2-tiny", {"tp": 2}, ()),
    ("gemma3-tiny", {"pp": 2}, WINDOWS),
    ("smollm3-tiny", {"pp": 2}, ("model.shape.rope_layers=[true, false]",)),
    ("mistral-tiny", {"cp": 2}, ("model.shape.window=9",)),
    ("gemma2-tiny", {"cp": 2}, ("model.shape.window=9",)),
    ("olmo2-tiny", {"fsdp": 2}, ()),
]
QUICK = ("olmo2-tiny", {"tp": 2})
"""Norms over all heads of a token, of which each rank has some."""


@pytest.mark.parametrize(
    ("size", "layout", "more"),
    [pytest.param(*case, marks=() if case[:2] == QUICK else pytest.mark.slow) for case in CASES],
)
def test_a_family_learns_the_same_on_two_ranks(
    size: str, layout: dict[str, int], more: tuple[str, ...]
) -> None:
    # Adam's first update of a weight without a gradient to speak of is a matter of its last bits, unless eps is larger.
    named = (f"model.name={size}", "optimizer.eps=1e-5", *more)
    reference = on_ranks(1, learn, "llama", {}, (), 2, "", named)[0]
    found = on_ranks(2, learn, "llama", layout, (), 2, "", named)
    if "pp" in layout:  # each rank has the gradients of its blocks
        whole = {name: value for ours in found for name, value in ours["gradients"].items()}
        found = [ours | {"gradients": whole} for ours in found]
    for ours in found:
        apart = furthest(ours, reference)
        assert max(apart.values()) < 3e-6, apart
