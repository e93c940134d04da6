from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

LONG = (
    "test_llama_3_2_1b_fp8_lives_in_its_whole_depth",
    "test_every_command_that_needs_a_gpu_runs_there",
    "test_a_ready_recipe_lives_on_a_gpu",
)
"""Tests of minutes that wait for a share of the card, the longest first. One worker with all of them would be the last for a long
time."""


@pytest.hookimpl(trylast=True)  # after `-m` has left its choice
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the long tests evenly over the others: workers start with equal parts of the list."""
    names = {item: getattr(item, "originalname", None) for item in items}
    long = [item for name in LONG for item in items if names[item] == name]
    if not long:
        return
    short = [item for item in items if item not in set(long)]
    every = len(short) // len(long) + 1
    items[:] = [item for n, one in enumerate(long) for item in (one, *short[n * every : (n + 1) * every])]


@pytest.fixture(autouse=True)
def _fresh_compiler_and_memory() -> Iterator[None]:
    """Graphs of other tests must not count against this one's limit of recompiles, nor their memory against its figures."""
    torch._dynamo.reset()
    yield
    gc.collect()
    torch.cuda.empty_cache()
