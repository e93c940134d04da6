"""Timed samples of a rate: one case, and one collective over several sizes."""

from __future__ import annotations

import statistics
from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One measured case: `amount` (FLOPs or bytes) done in each of `seconds`; the median gives the rate."""

    case: str
    amount: float
    seconds: tuple[float, ...]

    @property
    def rate(self) -> float:
        return self.amount / statistics.median(self.seconds)


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests defines it (its doc/PERFORMANCE.md).

    In a ring (ranks − 1)/ranks of the buffer passes each link once for an all-gather or reduce-scatter, twice for an
    all-reduce. A send to one neighbor passes once.
    """
    passes = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    return passes[operation] * (ranks - 1) / ranks if operation in passes else 1.0


@dataclass(frozen=True)
class Collective:
    """One operation between `ranks` processes, over a few sizes; `amount` is the bytes of the whole buffer."""

    operation: str
    backend: str
    ranks: int
    samples: tuple[Sample, ...]

    @property
    def bytes_per_s(self) -> float:
        """Bytes of the buffer over the time of the slowest rank, at the best size."""
        return max(sample.rate for sample in self.samples)

    @property
    def bus_bytes_per_s(self) -> float:
        """Bus bandwidth: comparable with the link's rate for any number of ranks."""
        return self.bytes_per_s * bus_factor(self.operation, self.ranks)
