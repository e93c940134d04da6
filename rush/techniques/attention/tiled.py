"""Declarations that all techniques with a tiled attention kernel share."""

from __future__ import annotations

import rush.techniques.api.contract as api

TILED_MEMORY = (
    api.MemoryEffect("scores", 0.0, "only the log-sum-exp is saved"),
    api.MemoryEffect(
        "attention.output", 1.0, "the output, which is also the next layer's input, and the log-sum-exp"
    ),
)
GROUPED_MEMORY = (
    *TILED_MEMORY,
    api.MemoryEffect("heads.repeated", 0.0, "the kernel supports grouped-query attention"),
)
HEAD_DIMS = (16, 32, 64, 128, 256)
"""The requirement of our own kernels."""
supported_head_dim = api.Requirement(
    f"it supports head dims {', '.join(map(str, HEAD_DIMS))}",
    lambda machine, recipe: recipe.shape().head_dim in HEAD_DIMS,
)
