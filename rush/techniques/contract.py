"""What a technique is: the contract that every file in this folder fills in.

A technique is one frozen `Technique` and one `apply`. `apply` changes a `Build`, the half-made run,
from outside: it replaces a seam of the plain model, sets an option of the update, or wraps the step.
The trainer knows no technique by name; it runs through the stages in order and lets each act.

`Build` starts as the honest baseline (fp32, eager, plain attention, full logits), so a recipe with
no techniques is exactly that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, Literal

import torch

from rush.hardware import Machine
from rush.models import Decoder
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
    MATERIALISE = 8
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


@dataclass(frozen=True)
class Requirement:
    """A condition on machine and recipe, with the sentence a person reads when it is not met."""

    sentence: str
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
    """What a technique does to one term of the planner's memory model: the term is multiplied by `factor`."""

    term: Literal[
        "parameters", "gradients", "optimizer", "master", "activations", "scores", "logits", "buffers"
    ]
    factor: float
    note: str = ""


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
    weight_dtypes: frozenset[str]
    state_bytes: Mapping[str, int]
    """Optimizer state by dtype."""
    num_parameters: int
    block_forwards: int
    """Forward passes of the first block in one micro batch, recomputation included."""
    largest_tensor: int
    """Elements of the largest tensor any operator made."""
    graphs: int
    graph_breaks: int
    recompiles: int
    micro_batches: int
    step_ms: float
    data_wait_ms: float
    peak_memory_bytes: int
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What a technique itself noted in `Build.facts`, and the live settings it may want to look at."""


@dataclass(frozen=True)
class Proof:
    """Whether a technique took effect, and what shows it."""

    took_effect: bool
    what: str


Evidence = Callable[[Observation, Mapping[str, Knob]], Proof]


@dataclass
class Build:
    """A run being built. The defaults are the plain baseline."""

    recipe: Recipe
    machine: Machine
    device: torch.device
    model: Decoder
    """On the meta device until MATERIALISE is over."""
    weight_dtype: torch.dtype = torch.float32
    autocast_dtype: torch.dtype | None = None
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    step_contexts: list[Callable[[], AbstractContextManager[Any]]] = field(default_factory=list)
    """Entered around every step, left after it: process-wide settings never leak out of a run."""
    loader_options: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    """Notes for the evidence: objects or numbers that show afterwards what happened."""


@dataclass(frozen=True)
class Technique:
    name: str
    stage: Stage
    apply: Callable[[Build, Mapping[str, Knob]], None]
    claim: Claim
    parity: Parity
    evidence: Evidence
    memory: tuple[MemoryEffect, ...] = ()
    requires: tuple[Requirement, ...] = ()
    conflicts: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    knobs: Mapping[str, KnobRange] = field(default_factory=dict)


def on_cuda(machine: Machine, recipe: Recipe) -> bool:
    return machine.device == "cuda"


needs_cuda = Requirement("it needs a CUDA GPU", on_cuda)
