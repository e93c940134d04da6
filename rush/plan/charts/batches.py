"""Checkpointing into a larger batch: speed and memory over the micro batch, under limits of memory.

Checkpointing costs at most a third more arithmetic and frees memory. It pays off only if the larger batch
that then fits is faster by more than that. Batches that are not powers of two (6, 12, 24) are tried as well:
the largest that fits is seldom a power of two.
"""

from __future__ import annotations

from typing import Any

from rush.plan.charts.options import ChartOptions, bare
from rush.plan.charts.points import Points
from rush.plan.describe import alternatives
from rush.plan.target import find_target
from rush.records.plan_chart import NO_CHECKPOINTING
from rush.techniques.api.contract import Alternative

MICROS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 64)
LIMITS_GB = (80.0, 24.0)
H200 = "h200-sxm"


def batch(options: ChartOptions, points: Points) -> dict[str, Any]:
    """Tokens per second and memory over the micro batch, without and with checkpointing, under each limit."""
    key = options.machine or H200
    name, recipe = options.load("llama-3.2-1b", "batch.micro=1", "batch.total_tokens=none")
    own = recipe.run.memory_limit_gb
    limits = (own,) if own else LIMITS_GB
    for limit in limits:
        target = find_target(key)
        for checkpointing in ("", *alternatives(Alternative.CHECKPOINTING)):
            extra = [checkpointing] if checkpointing else []
            for micro in MICROS:
                points.plan(
                    recipe, target, checkpointing or NO_CHECKPOINTING, micro, group=f"{limit:g} GB", name=f"micro {micro}",
                    techniques=[*bare(recipe, checkpointing=False), *extra], batch__micro=micro, run__memory_limit_gb=limit,
                )  # fmt: skip
    return {"machine": key, "limits_gb": list(limits), "recipes": [name]}
