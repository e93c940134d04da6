"""What is planned: a recipe's shape, batch and layout, and what its techniques do to memory.

Published measurements of other trainers become a `Spec` too, so both go through the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

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
"""What a chat template may put around the prompt of a sample."""


@dataclass(frozen=True)
class Spec:
    """Everything memory and time are computed from."""

    shape: Shape
    micro: int
    sequence: int
    passes: int
    """Micro batches of a step on each data rank."""
    layout: Mapping[str, int]
    effects: MemoryEffects
    techniques: Mapping[str, Mapping[str, Knob]] = field(default_factory=dict)
    device: str = "cuda"
    work: StepWork = NO_WORK
    rows: float = 1.0
    """Rows of a pass for each of `batch.micro`: 2 of a pair of answers, less where a micro batch is cut into passes."""
    reference: bool = False
    """Whether a frozen copy of the model is asked beside every pass."""
    sampled: tuple[int, int] = (0, 0)
    """Tokens of the prompt of a sample, at most, and tokens that are drawn; without samples none."""

    def size(self, axis: str) -> int:
        return self.layout.get(axis, 1)

    @cached_property
    def world(self) -> int:
        total = 1
        for axis in AXES:
            total *= self.size(axis)
        return total

    @cached_property
    def shards(self) -> int:
        """Into how many parts weights, gradients and moments are cut; fsdp cuts over the ranks of cp as well."""
        return self.size("fsdp") * (self.size("cp") if self.uses("fsdp") else 1)

    @property
    def stages(self) -> int:
        """Stages of the pipeline on each rank."""
        schedule = str(self.knob("pp", "schedule", "1f1b"))
        return int(self.knob("pp", "stages", 0)) or (2 if schedule in ("interleaved", "zbv") else 1)

    @property
    def stream_parts(self) -> int:
        """Into how many parts the stream between layers is cut by tensor parallelism."""
        return self.size("tp") if self.knob("tp", "sequence", True) else 1

    @cached_property
    def tokens(self) -> int:
        """Of one pass, on one rank."""
        return self.micro * self.sequence // self.size("cp")

    @property
    def step_tokens(self) -> int:
        """Of one step, over all ranks."""
        return self.micro * self.sequence * self.passes * self.size("ddp") * self.size("fsdp")

    def uses(self, *names: str) -> bool:
        return any(name in self.techniques for name in names)

    def knob(self, technique: str, knob: str, default: Knob) -> Knob:
        return self.techniques.get(technique, {}).get(knob, default)


def spec_of(recipe: Recipe, device: str = "cuda", *, beyond: bool = False) -> Spec:
    """The spec of a recipe; RecipeError where its layout does not divide the model or the batch, or (unless `beyond` is
    asked for) is one that this trainer does not run."""
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
        reference=_asks_reference(recipe),
        sampled=(len(recipe.run.sample_prompt.encode()) + TEMPLATE_TOKENS, recipe.run.sample_tokens)
        if recipe.run.sample_tokens
        else (0, 0),
    )
    check_divides(spec)
    return spec


def _asks_reference(recipe: Recipe) -> bool:
    objective = recipe.objective
    return objective.kind == "dpo" and objective.loss in ("sigmoid", "ipo") and objective.reference == "live"


def check_divides(spec: Spec) -> None:
    """Refuse a layout that does not divide the model or the sequence, with the sizes that do."""
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
    """Numbers of parameters by where they are; a block's are of one block."""

    block_linear: int
    block_other: int
    embedding: int
    head: int
    """0 where the head is the embedding."""
    final: int
    adapters: int
    """Of one block; 0 where the weights themselves learn."""
    largest: int
    """Of the largest tensor."""


def adapting(spec: Spec) -> tuple[int, str] | None:
    """Rank and roles of the adapters that learn in place of the weights; None where the weights do."""
    if not spec.effects.factor("frozen"):
        return None
    known = registry()
    for name, knobs in spec.techniques.items():
        if name in known and any(effect.term == "frozen" for effect in known[name].memory):
            return int(knobs["rank"]), str(knobs["roles"])
    return None


def adapted(shape: Shape, roles: str) -> list[ParameterSpec]:
    """The weights of one block that get an adapter."""
    wanted = ROLE_GROUPS[roles]
    return [
        parameter
        for parameter in list_parameters(shape)
        if parameter.name.startswith("blocks.0.")
        and parameter.matmul
        and (wanted is None or parameter.role in wanted)
    ]


def weights_of(spec: Spec) -> Weights:
    return _weights(spec.shape, adapting(spec))


@cache
def _weights(shape: Shape, adapters: tuple[int, str] | None) -> Weights:
    counts = dict.fromkeys(("linear", "other", "embedding", "head", "final"), 0)
    largest = 0
    for parameter in list_parameters(shape):
        if parameter.name.startswith("blocks.0."):
            counts["linear" if parameter.matmul else "other"] += parameter.count
        elif not parameter.name.startswith("blocks."):
            ends = {"embedding": "embedding", "positions": "embedding", "head": "head"}
            counts[ends.get(parameter.role, "final")] += parameter.count
        largest = max(largest, parameter.count)
    beside = 0
    if adapters is not None:
        rank, roles = adapters
        beside = sum(rank * sum(parameter.dims) for parameter in adapted(shape, roles))
    return Weights(
        counts["linear"],
        counts["other"],
        counts["embedding"],
        counts["head"],
        counts["final"],
        beside,
        largest,
    )


def matmul_dtype(spec: Spec) -> str:
    """The dtype of the products outside 8-bit layers."""
    if spec.effects.size("compute", 4) == 2:
        half = spec.work.name("products.dtype", "bfloat16")
        return half if half in HALF else "bfloat16"
    return spec.work.name("products.dtype", "float32")


def matmul_dtypes_of(spec: Spec) -> tuple[str, ...]:
    """Those of all its products, as rates are named."""
    usual = matmul_dtype(spec)
    return tuple(dict.fromkeys(spec.work.name(term, usual) for term in ("blocks.dtype", "head.dtype")))


def with_batch(spec: Spec, micro: int, sequence: int | None = None) -> Spec:
    """The same with another micro batch, and another length of sequences if given."""
    return replace(spec, micro=micro, sequence=sequence or spec.sequence)
