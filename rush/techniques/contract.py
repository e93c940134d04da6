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
from typing import Any

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


@dataclass(frozen=True)
class Technique:
    name: str
    stage: Stage
    apply: Callable[[Build, Mapping[str, Knob]], None]
    claim: Claim
    parity: Parity
    requires: tuple[Requirement, ...] = ()
    conflicts: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    knobs: Mapping[str, KnobRange] = field(default_factory=dict)


def on_cuda(machine: Machine, recipe: Recipe) -> bool:
    return machine.device == "cuda"


needs_cuda = Requirement("it needs a CUDA GPU", on_cuda)
