"""torch.compile without Inductor's C++; being imported is all it does.

Dynamo traces, AOTAutograd makes the joint graph, decomposes and partitions it, as in every compiled run; then the graphs
are interpreted instead of compiled, which takes two seconds of g++ each. The lives of `make test-all` compile them.
"""

from __future__ import annotations

from typing import Any

from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch._inductor import compile_fx


def _interpret(graph: Any, inputs: Any, *unused: Any, **ignored: Any) -> Any:
    return aot_eager_decomp_partition(graph, inputs)


compile_fx.compile_fx = _interpret
