"""The input of a plan: a recipe's shape, batch and layout, and the effects of its techniques.

Published measurements of other trainers become a `Spec` too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cache, cached_property

from rush.batch_schedule import last_step
from rush.errors import RecipeError
from rush.models import Shape
from rush.models.adapters import ROLE_GROUPS
from rush.models.counts import ParameterSpec, list_parameters
from rush.parallel import AXES
from rush.plan.effects import NO_WORK, MemoryEffects, StepWork, effects_of, work_of
from rush.recipe import Knob, Recipe
from rush.techniques import registry, resolve_uses

HALF = ("float16", "bfloat16")
TEMPLATE_TOKENS = 32
"""Tokens that a chat template may add to a prompt."""


@dataclass(frozen=True)
class Spec:
    """The input of all predictions."""

    shape: Shape
    micro: int
    sequence: int
    passes: int
    """Micro batches per step on each data rank."""
    layout: Mapping[str, int]
    effects: MemoryEffects
    techniques: Mapping[str, Mapping[str, Knob]] = field(default_factory=dict)
    device: str = "cuda"
    work: StepWork = NO_WORK
    rows: float = 1.0
    """Rows of a pass per `batch.micro`: 2 for a pair of answers, less where a micro batch is split into passes."""
    reference: bool = False
    """Whether every pass also runs a frozen reference model."""
    sampled: tuple[int, int] = (0, 0)
    """Maximum prompt tokens and new tokens of a sample; zeros without samples."""
    steps: int | None = None
    """Steps of the run, where the recipe names them."""
    phases: tuple[tuple[float, Fraction], ...] = ((1.0, Fraction(1)),)
    """Phases of a batch-size schedule: the fraction of all steps, and their size relative to that of the last steps."""

    def size(self, axis: str) -> int:
        return self.layout.get(axis, 1)

    @cached_property
    def world(self) -> int:
        return math.prod(self.size(axis) for axis in AXES)

    @cached_property
    def shards(self) -> int:
        """Shards of weights, gradients and moments; fsdp shards over the ranks of cp as well."""
        return self.size("fsdp") * (self.size("cp") if self.uses("fsdp") else 1)

    @property
    def stages(self) -> int:
        """Pipeline stages per rank."""
        schedule = str(self.knob("pp", "schedule", "1f1b"))
        return int(self.knob("pp", "stages", 0)) or (2 if schedule in ("interleaved", "zbv") else 1)

    @property
    def stream_shards(self) -> int:
        """Sequence-parallel shards of the residual stream."""
        return self.size("tp") if self.knob("tp", "sequence", True) else 1

    @cached_property
    def tokens(self) -> int:
        """Tokens of one pass on one rank."""
        return self.micro * self.sequence // self.size("cp")

    @property
    def step_tokens(self) -> int:
        """Tokens of one step over all ranks."""
        return self.micro * self.sequence * self.passes * self.size("ddp") * self.size("fsdp")

    def uses(self, *names: str) -> bool:
        return any(name in self.techniques for name in names)

    def knob(self, technique: str, knob: str, default: Knob) -> Knob:
        return self.techniques.get(technique, {}).get(knob, default)


def spec_of(recipe: Recipe, device: str = "cuda", *, beyond: bool = False) -> Spec:
    """The spec of a recipe; RecipeError where its layout does not divide the model or the batch, or (unless `beyond`) this
    trainer does not support it."""
    uses = resolve_uses(recipe)
    for use in uses:
        if use.technique.check_sizes is not None and not beyond:
            use.technique.check_sizes(recipe, use.knobs)
    effects = effects_of(uses, AXES)
    cut = round(effects.factor("passes")) or 1
    rows = 2 if recipe.objective.kind == "dpo" else 1  # a pair is two rows
    spec = Spec(
        shape=recipe.shape(),
        micro=-(-rows * recipe.micro // cut),
        sequence=recipe.batch.sequence,
        passes=recipe.accumulation * cut,
        layout=recipe.layout.model_dump(),
        effects=effects,
        techniques={use.technique.name: dict(use.knobs) for use in uses},
        device=device,
        work=work_of(uses),
        rows=rows / cut,
        reference=_runs_reference(recipe),
        sampled=(len(recipe.run.sample_prompt.encode()) + TEMPLATE_TOKENS, recipe.run.sample_tokens)
        if recipe.run.sample_tokens
        else (0, 0),
        steps=recipe.schedule.steps,
        phases=phases_of(recipe),
    )
    check_divides(spec)
    return spec


def phases_of(recipe: Recipe) -> tuple[tuple[float, Fraction], ...]:
    """The phases of a recipe's batch-size schedule; with numbers of steps, and epochs of an unknown length, the last size only."""
    ends, steps = [one.until for one in recipe.batch.schedule or ()], recipe.schedule.steps
    if steps is not None:
        ends = [last_step(end, steps) / steps for end in ends]
    elif any(isinstance(end, int) for end in ends):
        return ((1.0, Fraction(1)),)
    sizes = [Fraction(size, recipe.step_tokens) for size in recipe.step_sizes]
    return tuple(
        (end - before, size) for before, end, size in zip([0.0, *ends], [*ends, 1.0], sizes, strict=True)
    )


def _runs_reference(recipe: Recipe) -> bool:
    objective = recipe.objective
    return objective.kind == "dpo" and objective.loss in ("sigmoid", "ipo") and objective.reference == "live"


def check_divides(spec: Spec) -> None:
    """Refuse a layout that does not divide the model or the sequence, with the allowed sizes."""
    shape = spec.shape
    for axis, number, what in (
        ("tp", shape.num_kv_heads, "key/value heads"),
        ("tp", shape.intermediate, "width of the MLP"),
        ("cp", spec.sequence, "tokens of a sequence"),
    ):
        size = spec.size(axis)
        if number % size:
            legal = [n for n in range(1, min(number, 256) + 1) if number % n == 0]
            raise RecipeError(
                f"layout.{axis} is {size}, which does not divide {number} ({what}); allowed: {', '.join(map(str, legal))}."
            )
    if spec.size("pp") > shape.num_layers:
        raise RecipeError(
            f"layout.pp is {spec.size('pp')}, but there are {shape.num_layers} blocks; allowed: 1 to {shape.num_layers}."
        )


@dataclass(frozen=True)
class Weights:
    """Parameter counts; `block_*` are of one block."""

    block_linear: int
    block_other: int
    embedding: int
    head: int
    """0 with a tied head."""
    final: int
    adapters: int
    """Parameters of one block's adapters; 0 without adapters."""
    largest: int
    """Elements of the largest tensor."""
    block_tensors: int
    """Tensors of one block."""


def adapter_settings(spec: Spec) -> tuple[int, str] | None:
    """Rank and roles of the adapters; None without adapters."""
    if not spec.effects.factor("frozen"):
        return None
    known = registry()
    for name, knobs in spec.techniques.items():
        if name in known and any(effect.term == "frozen" for effect in known[name].memory):
            return int(knobs["rank"]), str(knobs["roles"])
    return None


def adapted_weights(shape: Shape, roles: str) -> list[ParameterSpec]:
    """The weights of one block with an adapter."""
    wanted = ROLE_GROUPS[roles]
    return [
        parameter
        for parameter in list_parameters(shape)
        if parameter.name.startswith("blocks.0.")
        and parameter.matmul
        and (wanted is None or parameter.role in wanted)
    ]


def weights_of(spec: Spec) -> Weights:
    return _weights(spec.shape, adapter_settings(spec))


@cache
def _weights(shape: Shape, adapters: tuple[int, str] | None) -> Weights:
    counts = dict.fromkeys((one.name for one in fields(Weights)), 0)
    for parameter in list_parameters(shape):
        if parameter.name.startswith("blocks.0."):
            counts["block_linear" if parameter.matmul else "block_other"] += parameter.count
            counts["block_tensors"] += 1
        elif not parameter.name.startswith("blocks."):
            ends = {"embedding": "embedding", "positions": "embedding", "head": "head"}
            counts[ends.get(parameter.role, "final")] += parameter.count
        counts["largest"] = max(counts["largest"], parameter.count)
    if adapters is not None:
        rank, roles = adapters
        counts["adapters"] = sum(rank * sum(parameter.dims) for parameter in adapted_weights(shape, roles))
    return Weights(**counts)


def block_matrices(shape: Shape) -> list[tuple[int, int]]:
    """Rows and columns of the matrices of one block."""
    return [
        (one.dims[0], one.dims[1])
        for one in list_parameters(shape)
        if one.matmul and one.name.startswith("blocks.0.")
    ]


def matmul_dtype(spec: Spec) -> str:
    """The dtype of the matmuls outside fp8 layers."""
    if spec.effects.size("compute", 4) == 2:
        half = spec.work.name("matmul.dtype", "bfloat16")
        return half if half in HALF else "bfloat16"
    return spec.work.name("matmul.dtype", "float32")


def matmul_dtypes_of(spec: Spec) -> tuple[str, ...]:
    """The dtypes of all matmuls, as rates are named."""
    usual = matmul_dtype(spec)
    return tuple(dict.fromkeys(spec.work.name(term, usual) for term in ("blocks.dtype", "head.dtype")))


def with_batch(spec: Spec, micro: int, sequence: int | None = None) -> Spec:
    """The same with another micro batch, and another sequence length if given."""
    return replace(spec, micro=micro, sequence=sequence or spec.sequence)
