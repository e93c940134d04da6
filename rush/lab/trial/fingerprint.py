"""A digest of everything that a technique could have changed and a profile shows.

Evidence is a technique's own function, and may be too lenient. A difference cannot be faked: if a rung ran
the same operators as often, with the same dtypes, settings, hooks and state as the rung before, and gave the
same bits, its addition had no effect, whatever its evidence returns.
"""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

from rush.techniques.api.contract import Observation
from rush.training.build import Run

COUNTED = ("aten::", "rush::", "autograd::")
"""Operators whose number does not depend on the profiler or the allocator."""


def fingerprint(run: Run, seen: Observation) -> str:
    """The digest of a profiled run; two runs of one recipe have the same digest, unless they differ by chance."""
    told: dict[str, Any] = {
        "operators": {name: count for name, count in seen.ops.items() if name.startswith(COUNTED)},
        "kernels": sorted(seen.kernels),
        "matmuls": [sorted(seen.matmul_dtypes), sorted(map(str, seen.matmul_shapes.items()))],
        "weights": sorted(seen.weight_dtypes),
        "state": sorted(seen.state_bytes.items()),
        "block forwards": seen.block_forwards,
        "passes": [seen.micro_batches, seen.loader_micro_batches, seen.micro_tokens],
        "compiled": [seen.compiled.graphs, seen.compiled.recompiles, seen.eager_step],
        "host": [seen.gc_enabled, seen.pinned, seen.loader_threads],
        "fp32 error": round(math.log10(max(seen.fp32_matmul_error, 1e-12))),
        "hooks": [
            len(run.step_contexts),
            len(run.pass_wrappers),
            len(run.before_step),
            len(run.before_pass),
            run.shard_batch is not None,
        ],
        "optimizer": [type(run.optimizer).__name__, getattr(run.norm_fn, "__qualname__", "")],
        "loader": sorted(run.loader_options),
        "modules": [type(module).__qualname__ for module in run.model.modules()],
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
