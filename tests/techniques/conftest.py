"""Every test of a technique starts with a compiler that has seen nothing: graphs of others would count against its limits."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="module")
def _freeze() -> None:
    """Every profile collects garbage, and would look through all that the tests of other files have made."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture(autouse=True)
def _interpreted_graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the slow tests graphs are traced, differentiated, partitioned, and interpreted: C++ takes ten seconds each."""
    if "not slow" in request.config.getoption("-m"):
        from torch._dynamo.backends.debugging import aot_eager_decomp_partition
        from torch._inductor import compile_fx

        def interpret(graph: Any, inputs: Any, *unused: Any, **ignored: Any) -> Any:
            return aot_eager_decomp_partition(graph, inputs)

        monkeypatch.setattr(compile_fx, "compile_fx", interpret)
