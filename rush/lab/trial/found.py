"""The types of what a trial finds: the JSON that its process writes, and that a bench stores and reads."""

from __future__ import annotations

from typing import Any, TypedDict


class TimingFound(TypedDict, total=False):
    """The result of `time_steps`; fields missing in old files are read with `get`."""

    samples_s: list[float]
    """Seconds per step, of each sample."""
    steps_per_sample: int
    counted: str
    """The kind of tokens that counts, one of `timing.KINDS`."""
    sample_tokens: dict[str, list[float]]
    """Tokens per step of each sample, by kind."""
    sample_steps: list[int]
    """The first step of each sample."""
    step_tokens: float
    step_labels: float
    compile_s: float
    warmup_s: float
    warmup_steps: int
    cold: bool
    """Whether the only sample is the first step, with compilation."""
    steady: bool
    hopeless: bool
    """Whether timing was ended early because the recipe is too slow."""
    data_wait_ms: float
    peak_memory_bytes: int
    flops_per_token: int | None
    dtype: str
    rate_dtype: str
    """The dtype whose matmul rate is the ceiling."""
    environment: dict[str, Any]


class TraceFound(TypedDict, total=False):
    """Loss and gradient norm of every step of a parity trace."""

    losses: list[float]
    grad_norms: list[float]
    skipped: int
    dtype: str
    """The matmul dtype; only in traces on several ranks."""


class RankFound(TypedDict, total=False):
    """What every rank of a trial reports of itself."""

    peak_memory_bytes: int | None
    exchange_ms: float | None
    exposed_ms: float | None
    profiled_step_ms: float | None
    evidence: list[dict[str, Any]] | None


class TrialFound(TypedDict, total=False):
    """Everything a trial may find; which fields there are depends on its kind."""

    complete: bool
    status: str
    reason: str | None
    ended: str
    """The status of a trial that failed after its timing."""
    lost: bool
    """Whether it failed because another rank did."""
    seconds: dict[str, float]
    """Time of each part."""
    machine: dict[str, Any]
    ceilings: dict[str, Any] | None
    peaks: dict[str, float] | None
    techniques: dict[str, dict[str, Any]]
    """Parity class and claim of each technique."""
    timing: TimingFound
    evidence: list[dict[str, Any]]
    breakdown_ms: dict[str, float]
    longest: list[dict[str, Any]]
    block_forwards: float | None
    trace: TraceFound
    twin: TraceFound
    """The trace of the perturbed reference run."""
    versions: dict[str, str]
    weights: str
    loss: float
    backend: str | None
    spectrum: dict[str, list[Any]]
    ranks: list[RankFound]
    peak_memory_bytes: int
    exchange_ms: float
    exposed_ms: float
    profiled_step_ms: float
    dtype: str
