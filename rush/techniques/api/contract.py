"""The contract that every technique implements.

A technique is one frozen `Technique` with an `apply` that changes a `Build`, the run under construction: it
replaces a module of the plain model, sets an option of the optimizer, or wraps the step. The trainer knows no
technique by name; it goes through the stages in order and applies each. `Build` starts as the plain baseline
(fp32, eager, plain attention, full logits), which is what a recipe without techniques runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum, IntEnum, StrEnum
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rush.data import Batch
from rush.hardware import Machine
from rush.models import Decoder, Shape
from rush.parallel import Ranks
from rush.parallel.sharded import NormFn, local_norm
from rush.recipe import Knob, Recipe
from rush.techniques.api.facts import CompileCounts, Facts

Knobs = Mapping[str, Knob]
"""The values of a technique's knobs, by name."""


class Stage(IntEnum):
    """When a technique is applied, in the order of the build."""

    ENV = 1
    MODEL = 2
    ADAPT = 3
    TENSOR = 4
    MEMORY = 5
    COMPILE = 6
    SHARD = 7
    MATERIALIZE = 8
    UPDATE = 9
    STEP = 10
    DATA = 11


class Parity(Enum):
    """How close the result is to plain fp32."""

    EXACT = "the same bits"
    CLOSE = "the same up to rounding"
    STATISTICAL = "other rounding or randomness, the same learning curve"
    CHANGES = "what is learned differs, by design"


class Alternative(StrEnum):
    """A choice of `rush plan --search`, which tries every technique that is an alternative of it."""

    PRECISION = "precision"
    EIGHT_BIT = "8-bit matmuls"
    CHECKPOINTING = "checkpointing"


@dataclass(frozen=True)
class Claim:
    """What the technique's authors say it gains, with regime and source."""

    metric: str
    gain: float
    regime: str
    source: str
    of_memory: bool = False
    """Whether the metric is memory, rather than time or traffic."""
    relative_to: str = "the rung before"
    """What the gain is over: the recipe without the technique (`the rung before` of a ladder), `plain fp32`, `the base` of a
    ladder, or the technique of this name. A report compares the claim with the gain over that."""


@dataclass(frozen=True)
class Requirement:
    """A condition on machine and recipe, with the message when it is not met."""

    message: str
    met: Callable[[Machine, Recipe], bool]
    library: bool = False
    """Whether installing a library satisfies it; plans for other machines ignore such requirements."""


@dataclass(frozen=True)
class KnobRange:
    """The values a knob may take; the first one is the default."""

    values: tuple[Knob, ...]
    meaning: str
    evidence: Evidence | None = None
    """Evidence that the value in use took effect: the technique's own `evidence` if that depends on it, or a function for this
    knob. A technique is never proved if one of its knobs has no evidence."""

    @property
    def default(self) -> Knob:
        return self.values[0]


@dataclass(frozen=True)
class MemoryEffect:
    """The effect of a technique on one memory term of the planner (`rush/plan/effects.py` lists them).

    The bytes of `term` are multiplied by `factor`; 0 removes it, and naming a term that a plain run does not have adds it.
    For axes of the layout the planner ignores the factors and divides by the sizes of the layout itself.
    """

    term: str
    factor: float
    note: str = ""
    by_knob: Callable[[Knobs], float] | None = None
    """The factor as a function of the knobs; `factor` is then that of the defaults."""
    size: float | None = None
    """Bytes per element."""
    keeps: tuple[str, ...] | None = None
    """Saved activations of a block are only these terms; the rest is recomputed or offloaded."""
    when: Callable[[Knobs], bool] | None = None
    """The knobs with which the effect applies; None: always."""

    def factor_of(self, knobs: Knobs) -> float:
        return self.factor if self.by_knob is None else self.by_knob(knobs)


@dataclass(frozen=True)
class WorkEffect:
    """The effect of a technique on one time term of the planner (`rush/plan/effects.py` lists them).

    If two techniques set a term, the larger number counts; for names, that of the later stage.
    """

    term: str
    value: float | str = 1.0
    note: str = ""
    by_knob: Callable[[Knobs], float | str] | None = None
    """The value as a function of the knobs; `value` is then that of the defaults."""
    when: Callable[[Knobs], bool] | None = None
    """The knobs with which the effect applies; None: always."""

    def value_of(self, knobs: Knobs) -> float | str:
        return self.value if self.by_knob is None else self.by_knob(knobs)


@dataclass(frozen=True)
class Call:
    """The arguments of an operator, as the profiler recorded them."""

    shapes: tuple[Any, ...]
    """Dims of the tensor arguments; () for others."""
    dtypes: tuple[str, ...]
    values: tuple[Any, ...]
    """Numbers, flags and lists of numbers; None for everything else."""


@dataclass(frozen=True)
class Observation:
    """Profile and live settings of a step or two, from which evidence is computed.

    Names are the profiler's. On a CPU `kernels` is empty and `ops` counts.
    """

    kernels: Mapping[str, float]
    """Device kernels of the profiled steps, with their total milliseconds."""
    ops: Mapping[str, int]
    """Host operators (aten::mm, autograd nodes, our custom ops) with their counts."""
    matmul_dtypes: frozenset[str]
    """Dtypes of matmul inputs: float32, bfloat16, …"""
    matmul_shapes: Mapping[tuple[int, int, int], float]
    """Matmuls (m, k, n) of the model's linear layers, with their counts per step."""
    weight_dtypes: frozenset[str]
    state_bytes: Mapping[str, int]
    """Optimizer state by dtype."""
    num_parameters: int
    """Trained parameters."""
    block_forwards: float
    """Forward passes of a block's linear layers per micro batch: 1, or 2 where all is recomputed."""
    largest_tensor: int
    """Elements of the largest operator input that is not the size of a parameter."""
    held_bytes: int
    """Bytes of saved activations of one micro batch."""
    compiled: CompileCounts
    """What was compiled since the build, or since the profile began."""
    micro_batches: int
    """Forward and backward passes in a step."""
    step_ms: float
    """A profiled step, slower than a timed one."""
    data_wait_ms: float
    peak_memory_bytes: int
    breakdown_ms: Mapping[str, float]
    """A profiled step by category: attention, matmul, norm_elementwise, loss, optimizer, data, other, idle."""
    matmuls_by_op: Mapping[str, float]
    """Matmuls of a step by operator."""
    eager_step: bool
    """Whether matmuls were seen in a further step, without graph and compiler."""
    fp32_matmul_error: float
    """The relative error of an fp32 matmul inside a step."""
    gc_enabled: bool
    """Whether automatic garbage collection is on inside a step."""
    pinned: bool
    """Whether all batches are in pinned memory."""
    loader_threads: int
    loader_micro_batches: int
    """Micro batches that the loader returns for a step."""
    micro_tokens: int
    """Tokens of a micro batch, on this rank."""
    skipped_steps: int
    """Steps without an update because scaled gradients overflowed."""
    comm_ms: float
    """Communication per step."""
    exposed_comm_ms: float
    """The part of it that no other kernel overlaps."""
    shape: Shape
    holds_head: bool
    """Whether this rank has the LM head."""
    facts: Facts
    """What techniques noted while they were applied."""
    longest: Sequence[Mapping[str, Any]] = ()
    """The longest kernels (on a CPU operators): `name`, `kind` as in the breakdown, `ms` and `calls` per step."""
    calls: Mapping[str, Mapping[Call, int]] = field(default_factory=dict)
    """How collectives, our own operators and a few others (`rush/profiling/calls.py`) were called, and how often."""

    @property
    def head_widths(self) -> set[int]:
        """Possible widths of the LM head's matmuls: the vocabulary, and as it is padded or sharded."""
        return {self.shape.vocab_size, self.facts.padded_vocab_size or self.shape.vocab_size}

    @property
    def pass_tokens(self) -> int:
        """Tokens of a forward pass, which may be smaller than the loader's micro batch."""
        return self.micro_tokens * self.loader_micro_batches // max(1, self.micro_batches)


@dataclass(frozen=True)
class Proof:
    """Whether a technique took effect, and what proves it."""

    took_effect: bool
    what: str


Pass = Callable[[Batch, Tensor], Tensor]
"""Forward and backward of one micro batch on the device: (batch, loss_scale) adds `loss_scale` times the gradient of the summed
loss to the gradients, and returns that loss, detached."""


class Passes(Protocol):
    """How micro batches run: one after another, or in the order of a pipeline schedule."""

    def train(self, batches: Sequence[Batch], loss_scale: Tensor) -> Tensor:
        """Forward and backward of all micro batches of a step; returns their summed loss."""
        ...

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """The summed loss of batches on the device, without gradients."""
        ...


Evidence = Callable[[Observation, Knobs], Proof]


@dataclass
class Build:
    """A run under construction. The defaults are the plain baseline."""

    recipe: Recipe
    machine: Machine
    device: torch.device
    model: Decoder
    """On the meta device until MATERIALIZE."""
    weight_dtype: torch.dtype = torch.float32
    weights_device: torch.device | None = None
    """Device of parameters, gradients and moments between their uses; None: the compute device."""
    shard_hooks: list[Callable[[Build], None]] = field(default_factory=list)
    """Called after the techniques of stage SHARD, before the model is materialized: for code that needs it sharded and
    compiled."""
    weight_hooks: list[Callable[[Decoder], None]] = field(default_factory=list)
    """Called once the weights are loaded, to initialize parameters that a technique added."""
    masters: bool = False
    """Whether each weight keeps its fp32 value before rounding as `parameter.master`, for the optimizer."""
    autocast_dtype: torch.dtype | None = None
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    optimizer_options: dict[str, Any] = field(default_factory=lambda: {"foreach": False})
    """Plain: unfused, one tensor at a time."""
    norm_fn: NormFn = local_norm
    """Computes the gradient norm, which clips the gradients and shows whether they are finite."""
    optimizer_hooks: list[Callable[[torch.optim.Optimizer], None]] = field(default_factory=list)
    """Called once with the optimizer."""
    scaler: torch.amp.GradScaler = field(default_factory=lambda: torch.amp.GradScaler("cpu", enabled=False))
    """Loss scaling for fp16."""
    step_contexts: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    """Context managers around every step: process-wide settings never leak out of a run."""
    pass_wrappers: list[Callable[[Pass], Pass]] = field(default_factory=list)
    """Wrappers of forward and backward of a micro batch; the first is the innermost."""
    shard_batch: Callable[[Batch], Batch] | None = None
    """Selects this rank's part of a micro batch, if other ranks compute the rest of the same samples."""
    before_step: list[Callable[[int], None]] = field(default_factory=list)
    """Called before the passes of a training step with its number."""
    before_pass: list[Callable[[bool], None]] = field(default_factory=list)
    """Called before a micro batch's pass with whether it is the last of its step."""
    ranks: Ranks = field(default_factory=Ranks)
    """The ranks of the run; one in the plain run."""
    wrap: Callable[[Decoder], nn.Module] | None = None
    """Wraps the finished model; training passes call the wrapper."""
    averaged_over: int = 1
    """Number of ranks over which gradients are averaged, where a step needs their sum."""
    stages: list[nn.Module] = field(default_factory=list)
    """This rank's pipeline stages of the model; empty without a pipeline."""
    make_passes: Callable[[Any, Sequence[nn.Module]], Passes] | None = None
    """Called once with the finished run and its wrapped parts; returns how its micro batches are run."""
    tied_replicas: list[str] = field(default_factory=list)
    """Parameters that another rank of the pipeline holds as well, and counts."""
    loader_options: dict[str, Any] = field(default_factory=dict)
    facts: Facts = field(default_factory=Facts)

    @property
    def roots(self) -> list[Any]:
        """What training passes call: the model, or this rank's pipeline stages of it."""
        return list(self.stages) or [self.model]

    @property
    def head_width(self) -> int:
        """Columns of the LM head's matmuls."""
        return self.facts.padded_vocab_size or self.model.shape.vocab_size


@dataclass(frozen=True)
class Setting:
    """One way to use a technique that `rush tune` tries."""

    knobs: Knobs = field(default_factory=dict)
    together_with: Mapping[str, Knobs] = field(default_factory=dict)
    """Techniques (by name, with their knobs) that it needs to train well or to pay off."""
    when: Callable[[Recipe], bool] = lambda recipe: True
    """Whether it can have an effect on the recipe."""


@dataclass(frozen=True)
class Technique:
    name: str
    stage: Stage
    apply: Callable[[Build, Knobs], None]
    claim: Claim
    parity: Parity
    evidence: Evidence
    memory: tuple[MemoryEffect, ...] = ()
    work: tuple[WorkEffect, ...] = ()
    requires: tuple[Requirement, ...] = ()
    conflicts: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    """For conflicts, why they cannot be combined, and what can."""
    after: tuple[str, ...] = ()
    """Techniques of the same stage that are applied before it."""
    knobs: Mapping[str, KnobRange] = field(default_factory=dict)
    head_only: bool = False
    """Whether it changes the LM head alone, which only the last stage of a pipeline has."""
    check_sizes: Callable[[Recipe, Knobs], None] | None = None
    """Raises RecipeError, with the allowed values, for sizes that it does not support."""
    nondeterministic: Callable[[Recipe, Knobs], str | None] = lambda recipe, knobs: None
    """Why it is not deterministic, and what to use instead: the message with which `run.deterministic` refuses it. None: it is
    deterministic, if necessary with other kernels under that key."""
    compiles: Callable[[Knobs], bool] = lambda knobs: False
    """Whether, with these knobs, its first step waits for a compiler."""
    settings: tuple[Setting, ...] = (Setting(),)
    """What `rush tune` tries, the most promising first; empty if the layout enables it, or the tuner varies it in another way
    (the micro batch)."""
    alternative: Alternative | None = None
    relative_error: float = 0.0
    """Relative error of its matmuls, where it rounds more than fp32."""
    half_dtype: str = ""
    """The 16-bit dtype of its matmuls and activations: bfloat16 or float16."""
    summary: Callable[[Knobs], str] = lambda knobs: ""
    """What the knobs of an axis of the layout choose, for the one-line description of a plan."""
    matmul_ops: Mapping[str, str] = field(default_factory=dict)
    """Its own matmul operators, with the dtype that they cast their operands to."""


@dataclass(frozen=True)
class Use:
    """A technique with its knobs resolved."""

    technique: Technique
    knobs: Knobs


def enabled_by_layout(axis: str) -> Requirement:
    """An axis of the layout is a technique of the same name: its size enables it, naming it only sets its knobs."""
    return Requirement(
        f"the layout enables it; set layout.{axis} to 2 or more",
        lambda machine, recipe: getattr(recipe.layout, axis) > 1,
    )


NO_CUDA_GRAPH = {
    "cuda_graph": "a captured graph holds the work of one device, and ranks communicate within a step; compile reduces "
    "launches with any layout"
}
"""Conflict reason of every axis of the layout."""

needs_cuda = Requirement("it needs a CUDA GPU", lambda machine, recipe: machine.device == "cuda")


def used(recipe: Recipe, *names: str) -> bool:
    """Whether the recipe uses one of these techniques."""
    return any((entry if isinstance(entry, str) else entry["name"]) in names for entry in recipe.techniques)


def knob_of(recipe: Recipe, name: str, knob: str, default: Knob) -> Knob:
    """The recipe's value of a technique's knob."""
    tables = (entry for entry in recipe.techniques if isinstance(entry, dict) and entry["name"] == name)
    return next((table.get(knob, default) for table in tables), default)


half_precision = Requirement(
    "on a GPU it needs matmuls in bf16 or fp16; add amp_bf16, amp_fp16, bf16_master or pure_bf16",
    lambda machine, recipe: (
        machine.device != "cuda" or used(recipe, "amp_bf16", "amp_fp16", "bf16_master", "pure_bf16")
    ),
)
