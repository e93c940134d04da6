"""torch.compile without Inductor's C++; being imported is all it does.

Dynamo traces, AOTAutograd makes the joint graph, decomposes and partitions it, as in every compiled run; then the graphs
are interpreted instead of compiled, which takes two seconds of g++ each. The lives of `make test-all` compile them. Nothing
here is timed, so no graph waits for Dynamo to flush the caches and measure its guards, or for a garbage collection.
"""

from __future__ import annotations

from typing import Any

from torch._dynamo import config, guards
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch._inductor import compile_fx


def _interpret(graph: Any, inputs: Any, *unused: Any, **ignored: Any) -> Any:
    return aot_eager_decomp_partition(graph, inputs)


def _no_latency(*unused: Any) -> float:
    return 0.0


compile_fx.compile_fx = _interpret
guards.profile_guard_manager = _no_latency
config.run_gc_after_compile = False
