"""What the packing techniques share: what they need, and how a run shows which batches it really got.

A packing is a choice of the loader, so nothing of it is in a profile. Instead each micro batch is looked at on its way
to the model: its shape, how much of it is padding, how many documents it holds and whether they are told apart.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

from rush.data import Batch
from rush.data.packing import Packing
from rush.techniques.api.contract import Build, KnobRange, Observation, Pass, Requirement, knob_of, used

PACKINGS = ("bucket", "flatten", "pack_best_fit", "pack_concat", "pad")
SHAPES = KnobRange(
    (0, 1, 2, 4, 8, 16, 32),
    "how many lengths rows may have, each a share of batch.sequence (1: always batch.sequence); 0: exactly the longest",
)
WINDOW_MEANING = "documents looked at together"

fine_tuning = Requirement(
    'it lays out conversations: it needs objective.kind = "sft" (pretraining cuts its windows from one line of tokens, '
    "preferences keep two answers together)",
    lambda machine, recipe: recipe.objective.kind == "sft",
)
more_than_one_row = Requirement(
    "it sorts the rows of a micro batch by length, so it needs batch.micro of 2 or more",
    lambda machine, recipe: recipe.micro > 1,
)


def others(name: str) -> tuple[str, ...]:
    """The packings that cannot stand beside this one."""
    return tuple(other for other in PACKINGS if other != name)


def few_shapes(name: str) -> Requirement:
    return Requirement(
        "every new length would start compile or cuda_graph anew; beside them set shapes to 1 … 32",
        lambda machine, recipe: (
            not used(recipe, name)
            or knob_of(recipe, name, "shapes", SHAPES.default) != 0
            or not used(recipe, "compile", "cuda_graph")
        ),
    )


@dataclass
class PackingStats:
    """What went through the model."""

    micro_batches: int = 0
    rows: int = 0
    tokens: int = 0
    padding: int = 0
    documents: int = 0
    isolated: int = 0
    """Micro batches whose documents are told apart."""
    shapes: Counter[tuple[int, int]] = field(default_factory=Counter)

    def note(self, batch: Batch) -> None:
        rows, length = batch.tokens_bt.shape
        self.micro_batches += 1
        self.rows += rows
        self.tokens += rows * length
        self.padding += batch.padding
        self.documents += len(batch.samples)
        self.isolated += batch.documents_bt is not None
        self.shapes[rows, length] += 1

    @property
    def padding_share(self) -> float:
        return self.padding / self.tokens

    def say(self, recompiles: int) -> str:
        listed = ", ".join(f"{rows}×{length}" for rows, length in sorted(self.shapes))
        return (
            f"{self.documents} documents in {self.micro_batches} micro batches of {listed}: {self.padding_share:.1%} of the "
            f"tokens are padding, {self.documents / self.rows:.1f} documents a row; {recompiles} recompiles"
        )


def use_packing(build: Build, packing: Packing) -> PackingStats:
    """Have the loader pack so, and look at what comes."""
    seen = PackingStats()
    build.loader_options["packing"] = packing
    build.facts["packing"] = seen

    def watched(inner: Pass) -> Pass:
        def passes(batch: Batch, loss_scale: Tensor) -> Tensor:
            seen.note(batch)
            return inner(batch, loss_scale)

        return passes

    build.pass_wrappers.append(watched)
    return seen


def allow_shapes(build: Build, shapes: int) -> None:
    """Under compile, let as many graphs be made as there are shapes, for training and for validation.

    The compiler gives up after a few, because it takes ever new shapes for a mistake.
    """
    if used(build.recipe, "compile"):
        import torch._dynamo

        limit = max(torch._dynamo.config.recompile_limit, 4 * shapes + 4)
        build.step_contexts.append(lambda: torch._dynamo.config.patch(recompile_limit=limit))


def packing_stats(seen: Observation) -> PackingStats | None:
    found = seen.facts.get("packing")
    return found if isinstance(found, PackingStats) and found.micro_batches else None
