"""torch.compile without Inductor's C++, and with its first graph behind it; being imported is all it does.

Dynamo traces, AOTAutograd makes the joint graph, decomposes and partitions it, as in every compiled run; then the graphs
are interpreted instead of compiled, which takes two seconds of g++ each. The lives of `make test-all` compile them. Nothing
here is timed, so no graph waits for Dynamo to flush the caches and measure its guards, or for a garbage collection.

The first graph of a process imports and registers what all others find: a small one is traced here, and forgotten.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo import config, guards
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch._inductor import compile_fx
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint


def _interpret(graph: Any, inputs: Any, *unused: Any, **ignored: Any) -> Any:
    return aot_eager_decomp_partition(graph, inputs)


def _no_latency(*unused: Any) -> float:
    return 0.0


compile_fx.compile_fx = _interpret
guards.profile_guard_manager = _no_latency
config.run_gc_after_compile = False


class _Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._block, x, use_reentrant=False).sum()

    def _block(self, x: torch.Tensor) -> torch.Tensor:
        q = self.linear(self.norm(x)).view(2, 1, 4, 8)
        return gelu(scaled_dot_product_attention(q, q, q, is_causal=True))


def _trace_one() -> None:
    # Commands are forked from this process, and no fork inherits threads: OpenMP's hang there, and a backward pass fails
    # with the threads that torch's CUDA build starts for autograd.
    if torch.version.cuda:
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    small = torch.compile(_Small())
    small(torch.ones(8, 8)).backward()
    with torch.no_grad():
        small(torch.ones(8, 8))
    torch._dynamo.reset()
    torch.set_num_threads(threads)


_trace_one()
