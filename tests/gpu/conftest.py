from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_compiler_and_memory() -> Iterator[None]:
    """Graphs of other tests must not count against this one's limit of recompiles, nor their memory against its figures."""
    torch._dynamo.reset()
    yield
    gc.collect()
    torch.cuda.empty_cache()
