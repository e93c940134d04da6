"""What a technique is: the contract that every file in this folder fills in.

A technique is one frozen `Technique` and one `apply`. `apply` changes a `Build`, the half-made run,
from outside: it replaces a seam of the plain model, sets an option of the update, or wraps the step.
The trainer knows no technique by name; it runs through the stages in order and lets each act.

`Build` starts as the honest baseline (fp32, eager, plain attention, full logits), so a recipe with
no techniques is exactly that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rush.data import Batch
from rush.hardware import Machine
from rush.models import Decoder
from rush.parallel import Ranks
from rush.parallel.sharded import NormFn, local_norm
from rush.recipe import Knob, Recipe


class Stage(IntEnum):
    """When in the build a technique acts. The order is the order of the build."""

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
    """What a technique promises about the result, compared with plain fp32."""

    EXACT = "the same bits"
    CLOSE = "the same up to rounding"
    STATISTICAL = "other rounding or randomness, the same learning curve"
    CHANGES = "what is learned differs, by design"


@dataclass(frozen=True)
class Claim:
    """What the technique's authors say it gains: falsifiable, with its regime and source."""

    metric: str
    gain: float
    regime: str
    source: str

    @property
    def of_memory(self) -> bool:
        """Whether it is about bytes that are held, rather than about time or traffic."""
        return "bytes" in self.metric and "moved" not in self.metric


@dataclass(frozen=True)
class Requirement:
    """A condition on machine and recipe, with the message a person reads when it is not met."""

    message: str
    met: Callable[[Machine, Recipe], bool]


@dataclass(frozen=True)
class KnobRange:
    """The values a knob may take; the first one is the default."""

    values: tuple[Knob, ...]
    meaning: str

    @property
    def default(self) -> Knob:
        return self.values[0]


@dataclass(frozen=True)
class MemoryEffect:
    """What a technique does to one thing that the planner counts; `rush/plan/effects.py` lists them all.

    The bytes of `term` are multiplied by `factor`: 0 takes it away, and a term that a plain run does not have is there as
    soon as somebody names it. Of an axis of the layout the factors are for reading only: the planner divides by the
    sizes of the layout itself.
    """

    term: str
    factor: float
    note: str = ""
    by_knob: Callable[[Mapping[str, Knob]], float] | None = None
    """The factor where it depends on the technique's knobs; `factor` is then that of the defaults."""
    size: float | None = None
    """Bytes of one element from now on."""
    keeps: tuple[str, ...] | None = None
    """Of all that a block leaves for its backward pass only these terms stay; the rest is made or fetched again."""

    when: Callable[[Mapping[str, Knob]], bool] | None = None
    """The effect is there only with these knobs; always, without it."""

    def factor_of(self, knobs: Mapping[str, Knob]) -> float:
        return self.factor if self.by_knob is None else self.by_knob(knobs)


@dataclass(frozen=True)
class WorkEffect:
    """What a technique does to the work of a step, as the planner counts it; `rush/plan/effects.py` lists the terms.

    The plain run has a value of its own for each; of two techniques that name the same term the larger number counts, and
    of two names the later stage's.
    """

    term: str
    value: float | str = 1.0
    note: str = ""
    by_knob: Callable[[Mapping[str, Knob]], float | str] | None = None
    """The value where it depends on the technique's knobs; `value` is then that of the defaults."""
    when: Callable[[Mapping[str, Knob]], bool] | None = None
    """The effect is there only with these knobs; always, without it."""

    def value_of(self, knobs: Mapping[str, Knob]) -> float | str:
        return self.value if self.by_knob is None else self.by_knob(knobs)


@dataclass(frozen=True)
class Observation:
    """What was seen while a run made a step or two: the material evidence is made of.

    Names are as the profiler gives them. On a CPU `kernels` is empty and `ops` tells the story.
    """

    kernels: Mapping[str, float]
    """Device kernels of the profiled steps, with their total milliseconds."""
    ops: Mapping[str, int]
    """Host operators (aten::mm, autograd nodes, our custom ops) with how often they ran."""
    matmul_dtypes: frozenset[str]
    """Dtypes of the inputs of matrix products: float32, bfloat16, …"""
    matmul_shapes: Mapping[tuple[int, int, int], float]
    """Matrix products (rows, inner, columns) of the model's linear layers, with how often each ran in a step."""
    weight_dtypes: frozenset[str]
    state_bytes: Mapping[str, int]
    """Optimizer state by dtype."""
    num_parameters: int
    """Those that are trained."""
    block_forwards: float
    """How often a block's linear layers were computed forward per micro batch: 1, or 2 where all is recomputed."""
    largest_tensor: int
    """Elements of the largest tensor an operator read that has not the size of a parameter."""
    held_bytes: int
    """Bytes that the forward pass of one micro batch left in memory for its backward pass."""
    graphs: int
    graph_breaks: int
    recompiles: int
    micro_batches: int
    """Forward and backward passes in a step."""
    step_ms: float
    """Of a profiled step, so slower than a timed one."""
    data_wait_ms: float
    peak_memory_bytes: int
    breakdown_ms: Mapping[str, float]
    """A profiled step by what the time went to: attention, matmul, norm_elementwise, loss, optimizer, data,
    other, idle."""
    longest: Sequence[Mapping[str, Any]] = ()
    """The kernels (on a CPU the operators) that took longest: `name`, `kind` as in the breakdown, `ms` and `calls` a step."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What a technique itself noted in `Build.facts`, and the live settings it may want to look at."""


@dataclass(frozen=True)
class Proof:
    """Whether a technique took effect, and what shows it."""

    took_effect: bool
    what: str


Pass = Callable[[Batch, Tensor], Tensor]
"""Forward and backward of one micro batch on the device: (batch, loss_scale) adds `loss_scale` times the gradient of the summed
loss to the gradients, and returns that loss, detached."""


class Passes(Protocol):
    """How micro batches go through the model: one after another, or in the order of a pipeline."""

    def train(self, batches: Sequence[Batch], loss_scale: Tensor) -> Tensor:
        """Forward and backward of all micro batches of a step, each as a `Pass`: their summed loss."""
        ...

    def evaluate(self, batches: Iterable[Batch]) -> float:
        """The summed loss of batches on the device, without gradients."""
        ...


Evidence = Callable[[Observation, Mapping[str, Knob]], Proof]


@dataclass
class Build:
    """A run being built. The defaults are the plain baseline."""

    recipe: Recipe
    machine: Machine
    device: torch.device
    model: Decoder
    """On the meta device until MATERIALIZE is over."""
    weight_dtype: torch.dtype = torch.float32
    weights_device: torch.device | None = None
    """Where parameters (and with them gradients and moments) lie between their uses; None: where they are computed with."""
    shard_hooks: list[Callable[[Build], None]] = field(default_factory=list)
    """Called after the techniques of stage SHARD, before the model has memory: for what must see it cut and compiled."""
    weight_hooks: list[Callable[[Decoder], None]] = field(default_factory=list)
    """Called once the model has its memory and weights: parameters that a technique added are its own to fill."""
    masters: bool = False
    """Whether each weight keeps, as `parameter.master`, the fp32 value it was rounded from, for the optimizer to take over."""
    autocast_dtype: torch.dtype | None = None
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    optimizer_options: dict[str, Any] = field(default_factory=lambda: {"foreach": False})
    """The plain update is one operation after another for each tensor."""
    norm_fn: NormFn = local_norm
    """How the gradients' norm is computed, which clips them and shows whether they are sound."""
    optimizer_hooks: list[Callable[[torch.optim.Optimizer], None]] = field(default_factory=list)
    """Called once with the finished optimizer."""
    scaler: torch.amp.GradScaler | None = None
    """Scales the loss before the backward pass, and the gradients back before they are used."""
    step_contexts: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    """Entered around every step, left after it: process-wide settings never leak out of a run."""
    pass_wrappers: list[Callable[[Pass], Pass]] = field(default_factory=list)
    """Each goes around the forward and backward of a micro batch; the first is the innermost."""
    shard_batch: Callable[[Batch], Batch] | None = None
    """Gives of a micro batch the part that this rank works on, where others work on the rest of the same samples."""
    before_pass: list[Callable[[bool], None]] = field(default_factory=list)
    """Each is told, before a micro batch's pass, whether it is the last of its step."""
    ranks: Ranks = field(default_factory=Ranks)
    """The processes that train together; this one alone, in the plain run."""
    wrap: Callable[[Decoder], nn.Module] | None = None
    """Puts something around the finished model, which training passes call instead of it."""
    averaged_over: int = 1
    """Over how many ranks the gradients are averaged, where a step wants their sum."""
    stages: list[nn.Module] = field(default_factory=list)
    """What training passes call where that is not the model as one: the stages that this rank has of it."""
    make_passes: Callable[[Any, Sequence[nn.Module]], Passes] | None = None
    """Called once with the finished run and its parts (with what `wrap` put around each): how its micro batches are run."""
    tied_replicas: list[str] = field(default_factory=list)
    """Parameters that another rank of the pipeline holds as well, and counts."""
    loader_options: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    """Notes for the evidence: objects or numbers that show afterwards what happened."""


@dataclass(frozen=True)
class Setting:
    """One way to use a technique that is worth a trial: its knobs, and what belongs beside it."""

    knobs: Mapping[str, Knob] = field(default_factory=dict)
    together_with: Mapping[str, Mapping[str, Knob]] = field(default_factory=dict)
    """Techniques (by name, with their knobs) that it is put on together with, because it learns or pays only so."""
    when: Callable[[Recipe], bool] = lambda recipe: True
    """Whether it can do anything in such a recipe."""


@dataclass(frozen=True)
class Technique:
    name: str
    stage: Stage
    apply: Callable[[Build, Mapping[str, Knob]], None]
    claim: Claim
    parity: Parity
    evidence: Evidence
    memory: tuple[MemoryEffect, ...] = ()
    work: tuple[WorkEffect, ...] = ()
    requires: tuple[Requirement, ...] = ()
    conflicts: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why it cannot stand beside one of them, and what can; told where the other one does not know it."""
    after: tuple[str, ...] = ()
    """Techniques of the same stage that are applied before it."""
    knobs: Mapping[str, KnobRange] = field(default_factory=dict)
    head_only: bool = False
    """Whether it acts on the head alone, which of a pipeline the last rank has: the others have nothing to prove."""
    check_sizes: Callable[[Recipe, Mapping[str, Knob]], None] | None = None
    """Raises RecipeError, with the legal values, for sizes of the recipe that it cannot divide."""
    nondeterministic: Callable[[Recipe, Mapping[str, Knob]], str | None] = lambda recipe, knobs: None
    """Why its results can differ in their last bits from run to run, and what to take instead: `run.deterministic` refuses it
    with that. None where it gives the same bits, if need be by other kernels under that key."""
    compiles: Callable[[Mapping[str, Knob]], bool] = lambda knobs: False
    """Whether, with these knobs, its first step waits long for a compiler: such a trial takes longer than others."""
    settings: tuple[Setting, ...] = (Setting(),)
    """What `rush tune` tries of it, the likeliest first; nothing where something else decides that it is on (a layout) or
    the tuner has another way to the same (the micro batch)."""


@dataclass(frozen=True)
class Use:
    """A technique with its knobs settled."""

    technique: Technique
    knobs: Mapping[str, Knob]


def enabled_by_layout(axis: str) -> Requirement:
    """An axis of the layout is a technique of the same name: its size puts it on, naming it only sets its knobs."""
    return Requirement(
        f"it is put on by a layout of several ranks; set layout.{axis} to 2 or more",
        lambda machine, recipe: getattr(recipe.layout, axis) > 1,
    )


NO_CUDA_GRAPH = {
    "cuda_graph": "a recording holds the work of one device, and ranks talk to each other within a step; compile makes "
    "steps with fewer launches beside any layout"
}
"""Of every axis of the layout."""

needs_cuda = Requirement("it needs a CUDA GPU", lambda machine, recipe: machine.device == "cuda")


def used(recipe: Recipe, *names: str) -> bool:
    """Whether the recipe asks for one of these techniques."""
    return any(name in names for name, _ in recipe.technique_uses())


def knob_of(recipe: Recipe, name: str, knob: str, default: Knob) -> Knob:
    """What the recipe sets a technique's knob to."""
    return next(
        (knobs.get(knob, default) for used, knobs in recipe.technique_uses() if used == name), default
    )


half_precision = Requirement(
    "on a GPU it needs matmuls in bf16 or fp16; add amp_bf16, amp_fp16, bf16_master or pure_bf16",
    lambda machine, recipe: (
        machine.device != "cuda" or used(recipe, "amp_bf16", "amp_fp16", "bf16_master", "pure_bf16")
    ),
)
