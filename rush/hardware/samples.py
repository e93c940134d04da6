"""What a rate is made of: one timed case, and one collective over several sizes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sample:
    """One measured case: `amount` (FLOPs or bytes) done in each of `seconds`; the median gives the rate."""

    case: str
    amount: float
    seconds: tuple[float, ...]

    @property
    def rate(self) -> float:
        ordered = sorted(self.seconds)
        middle = len(ordered) // 2
        median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
        return self.amount / median


def bus_factor(operation: str, ranks: int) -> float:
    """What a link carries for each byte of the buffer, as nccl-tests defines it (its doc/PERFORMANCE.md).

    In a ring every byte passes each link once for a gather or a scatter, less the part that is already there, and twice for
    a sum that all get. A message to one neighbour is the message.
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
        """What each rank's link carries: comparable with the link's rate, whatever the number of ranks."""
        return self.bytes_per_s * bus_factor(self.operation, self.ranks)
