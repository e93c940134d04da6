"""Efficiencies relative to measured rates: the few numbers that are fitted to findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Efficiencies:
    """Fractions of the rates that parts of a step reach. Fitted to findings; `rush plan --check` reports the errors."""

    matmul: Mapping[str, float] = field(
        default_factory=lambda: {
            "float32": 1.05,
            "tf32": 0.97,
            "float16": 1.04,
            "bfloat16": 0.97,
            "float8": 1.07,
        }
    )
    """Relative to the rate of a large matmul."""
    attention: Mapping[str, float] = field(default_factory=dict)
    """By kernel, relative to a large matmul, at head dim 64, counting six matmuls per pass; default: what the technique declares."""
    wide_heads: float = 1.45
    """Gain of head dim 128 over 64: more FLOPs per exponential."""
    eager: float = 0.65
    """Eager elementwise operations, relative to the copy rate."""
    fused: float = 0.87
    """Generated and hand-written kernels, relative to the copy rate."""
    loss: float = 0.88
    update: float = 0.64
    """Fused update, relative to the copy rate."""
    eager_update: float = 1.0
    launch_s: float = 14.2e-6
    """Host time per operator call, where no probe measured it."""
    launching: float = 1.25
    """Where a probe measured it: host time of a model's operator relative to the probe's. Assumed: hosts without a probe fit
    14.2 µs where probes measure 10.5 to 14.4 (docs/plan.md)."""
    step_s: float = 1e-3
    """Overhead per step: the gap between two steps, the first launches."""
    block_s: float = 0.15e-3
    """Overhead per block and pass: gaps between kernels."""
    link: float = 0.80
    """Collectives, relative to a link's rate."""
    contention: float = 0.15
    """Slowdown of compute by overlapped communication, relative to its time."""


DEFAULT = Efficiencies()
