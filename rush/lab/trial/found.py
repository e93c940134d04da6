"""The types of what a trial finds: the JSON that its process writes, and that a bench stores and reads."""

from __future__ import annotations

from typing import Any, TypedDict


class StepsFound(TypedDict, total=False):
    """A row for each step, warm-up and timed (`rush/lab/trial/step_log.py`)."""

    losses: list[float]
    grad_norms: list[float]
    rows: list[int]
    labels: list[int]
    tokens: list[int]
    digests: list[str]
    """Digest of the loader's batches, inputs and labels."""
    reached_rows: list[int]
    """Rows that reached the innermost pass; 0 where a captured graph was replayed."""
    reached_tokens: list[int]
    skipped: int
    captured: bool
    """Whether a CUDA graph was captured."""


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
    steps: StepsFound
    elsewhere_bytes: int
    """Memory that the run took outside of the device: in the host's memory, and in processes it started."""
    packed: bool
    """Whether a technique decides how documents are laid out in rows, so that batches are its own."""


class TraceFound(TypedDict, total=False):
    """Loss and gradient norm of every step of a parity trace."""

    losses: list[float]
    grad_norms: list[float]
    skipped: int
    dtype: str
    """The matmul dtype; only in traces on several ranks, and in those of this version."""
    steps: StepsFound
    flow: FlowFound
    """Over the first steps."""
    moved_steps: int
    """Steps after which the weights' movement was kept, beside the gradients."""
    unmoved: list[str]
    """Trained tensors that were the same after all steps."""
    weights: str
    """float32, or shorter: the trained weights, or their masters."""
    in_fp32: dict[str, Any]
    """A step without the techniques that round."""


class FlowFound(TypedDict, total=False):
    """What the loader returned and what reached the innermost pass, for each audited step."""

    labels: list[int]
    reached_labels: list[int]
    """0 where a captured graph was replayed."""
    digests: list[list[str]]
    """Digest of every full micro batch."""
    reached_digests: list[list[str]]


class AuditFound(TypedDict, total=False):
    """Steps after the timing, each recomputed in plain fp32 from the run's own weights (`rush/lab/parity/audit.py`)."""

    steps: int
    """Steps that were compared."""
    losses: list[float]
    plain_losses: list[float]
    grad_norms: list[float]
    plain_grad_norms: list[float]
    errors: dict[str, float | None]
    """The relative error of each tensor's gradient; None where it has none."""
    repeats: bool
    """Whether a step's gradients were those of the step before."""
    flow: FlowFound
    unmoved: list[str]
    updates: dict[str, Any] | None
    """Against AdamW's formula; None where moments cannot be read."""
    why: str
    """Why nothing could be compared."""


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
    ended_reason: str | None
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
    audit: AuditFound
    curve: TraceFound
    """The reference's steps on the timed batches."""
    curve_twin: TraceFound
    seen: str
    """A digest of what ran, to be compared with that of another rung."""
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
