"""The parts of a ladder as the pages know them: plain data, None for what is not known.

`reading` fills them in from `ladder.json`; everything else only looks at them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Json = Any


@dataclass(frozen=True)
class MeasureView:
    """A median with its 95 % interval and the samples behind it."""

    median: float
    low: float | None = None
    high: float | None = None
    n: int | None = None
    samples: tuple[float, ...] = ()
    processes: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True)
class GainView:
    ratio: float
    low: float | None
    high: float | None
    over: str | None
    real: bool | None
    paired: int | None = None
    """On how many batches the two were compared one by one; None where by their medians."""


@dataclass(frozen=True)
class ParityView:
    verdict: str
    promise: str | None
    tolerance: float | None
    worst: float | None
    steps: int | None
    losses: tuple[float | None, ...]
    reference_losses: tuple[float | None, ...]
    grad_norms: tuple[float | None, ...]
    reference_grad_norms: tuple[float | None, ...]
    worst_tensor: str | None
    worst_tensor_error: float | None
    why: str | None


@dataclass(frozen=True)
class LifeView:
    """Whether a rung could be trained with: `ok`, `broken` or `not known`, and the sentence to it."""

    verdict: str
    said: str


@dataclass(frozen=True)
class ClaimView:
    metric: str
    gain: float | None
    regime: str | None
    source: str | None


@dataclass(frozen=True)
class EvidenceView:
    technique: str
    took_effect: bool
    what: str


@dataclass(frozen=True)
class KernelView:
    """A kernel (on a CPU an operator) of a profiled step, all its calls together."""

    name: str
    kind: str
    ms: float
    calls: float


@dataclass(frozen=True)
class RungView:
    index: int
    name: str
    title: str
    adds: tuple[str, ...]
    techniques: tuple[str, ...]
    recipe: str | None
    digest: str | None
    kept: bool
    """Whether the rungs above stand on it."""
    status: str
    reason: str | None
    verdict: str
    speed: MeasureView | None = None
    step: MeasureView | None = None
    kinds: Mapping[str, float] = field(default_factory=dict)
    mfu: float | None = None
    hfu: float | None = None
    ceiling_fraction: float | None = None
    flops_per_token: float | None = None
    bytes_per_step: float | None = None
    step_tokens: int | None = None
    micro: int | None = None
    sequence: int | None = None
    peak_memory_bytes: float | None = None
    compile_s: float | None = None
    warmup_s: float | None = None
    warmup_steps: int | None = None
    data_wait_ms: float | None = None
    evidence: tuple[EvidenceView, ...] = ()
    parity: ParityView | None = None
    life: LifeView | None = None
    """None where it was not tried, as in records of earlier versions."""
    gain: GainView | None = None
    total_gain: GainView | None = None
    claim: ClaimView | None = None
    breakdown: Mapping[str, float] = field(default_factory=dict)
    longest: tuple[KernelView, ...] = ()
    environment: Mapping[str, Json] = field(default_factory=dict)

    @property
    def usable(self) -> bool:
        """Whether nothing is known to keep it from being trained with."""
        return self.life is None or self.life.verdict != "broken"


@dataclass(frozen=True)
class BatchPointView:
    micro: int
    status: str
    speed: MeasureView | None
    peak_memory_bytes: float | None


@dataclass(frozen=True)
class DriftView:
    first: float | None
    again: float | None
    ratio: float | None
    flagged: bool
    restless: bool = False
    """Its interval is so wide that nothing can be told."""
    paired: int | None = None
    uneven: bool = False
    """The unequal batches alone may be why; they were not compared one by one."""

    @property
    def verdict(self) -> str:
        if self.flagged:
            return "more than its interval allows"
        if self.restless:
            return (
                "but the batches differ too much to tell"
                if self.uneven
                else "but the machine was too busy to tell"
            )
        return (
            f"within its interval, on {self.paired} batches one by one"
            if self.paired
            else "within its interval"
        )


@dataclass(frozen=True)
class InteractionView:
    technique: str
    alone: float | None
    in_ladder: float | None
    left_out: float | None
    sentence: str | None


@dataclass(frozen=True)
class LadderView:
    name: str
    view: str
    started: str | None
    finished: str | None
    machine: Mapping[str, Json]
    matmul: Mapping[str, float]
    copy_bytes_per_s: float | None
    transfers: Mapping[str, float]
    """Measured bytes per second between host and device, by kind."""
    other_ceilings: Mapping[str, Json]
    peaks: Mapping[str, float]
    base_recipe: str | None
    formulas: Mapping[str, str]
    rungs: tuple[RungView, ...]
    drift: DriftView | None
    batch_curve: tuple[BatchPointView, ...]
    batch_stops_paying_at: int | None
    sequence_limits: tuple[Mapping[str, Json], ...]
    interactions: tuple[InteractionView, ...]
    trained: bool = False
    """Whether speeds count the tokens learned from, as in fine-tuning, instead of all."""

    @property
    def rate(self) -> str:
        """What a speed is."""
        return "trained tokens per second" if self.trained else "tokens per second"

    def rung(self, name: str | None) -> RungView | None:
        return next((rung for rung in self.rungs if rung.name == name), None)
