"""What parts of a step reach of the rates they are bound by: the few numbers that are fitted to findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Efficiencies:
    """What parts reach of the rates they are bound by. Fitted to findings; `rush plan --check` says how well."""

    matmul: Mapping[str, float] = field(
        default_factory=lambda: {
            "float32": 1.05,
            "tf32": 0.97,
            "float16": 1.04,
            "bfloat16": 0.97,
            "float8": 1.07,
        }
    )
    """Of the rate of a large product."""
    attention: Mapping[str, float] = field(default_factory=dict)
    """By kernel, of the rate of a large product, at head dim 64, counting the six products of a pass; what is not here is what
    the kernel's technique says."""
    wide_heads: float = 1.45
    """What heads of 128 gain over heads of 64: more arithmetic for each exponential."""
    eager: float = 0.65
    """Of the copy rate: operations one after another on tensors of a few megabytes."""
    fused: float = 0.87
    """Of the copy rate: generated and hand-written kernels."""
    loss: float = 0.88
    update: float = 0.64
    """Of the copy rate: the fused update of all tensors."""
    eager_update: float = 1.0
    launch_s: float = 14.2e-6
    """What a host needs to call one operator of a pass, where its probe does not say; for machines whose host nobody saw a guess."""
    launching: float = 1.25
    """Where the probe does say: what an operator of a model takes of what it measured. Assumed: hosts without a probe fit 14.2 µs
    where others' probes say 10.5 to 14.4; of two steps that a probed host decided, each says more (docs/plan.md)."""
    step_s: float = 1e-3
    """What a step takes besides: the wait between two steps, the first launches."""
    block_s: float = 0.15e-3
    """And a block for each pass: what the device rests between kernels, a hundred times one or two microseconds."""
    link: float = 0.80
    """Of a link's rate: what collectives reach."""
    contention: float = 0.15
    """Of the time of sending that hides behind computing: what computing loses by it."""


DEFAULT = Efficiencies()
