"""Model FLOPs utilization (MFU).

MFU is the model's FLOPs (formula in rush.models.counts) over the datasheet's dense peak for the dtype of the matmuls. For a
device without a datasheet entry, such as a laptop's CPU, the measured matmul rate takes its place, and the figure is called
`ceiling_fraction`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rush.hardware import ceilings, datasheet_peak
from rush.training.build import Run


@dataclass(frozen=True)
class UtilizationMetric:
    name: Literal["mfu", "ceiling_fraction"]
    flops_per_token: float
    rate: float | None
    """FLOP/s that count as 100 %; None where unknown."""


def utilization_metric(run: Run) -> UtilizationMetric:
    """MFU where the datasheet is known, else the fraction of the measured matmul rate."""
    work = run.flops_per_token()
    dtype = run.rate_dtype()
    peak = datasheet_peak(run.machine, dtype)
    if peak is not None:
        return UtilizationMetric("mfu", work, peak)
    # A machine that only emulates a dtype, as a CPU does fp8, has no rate for it.
    return UtilizationMetric(
        "ceiling_fraction", work, ceilings(run.machine, (dtype,), bandwidth=False).matmul_rate(dtype)
    )
