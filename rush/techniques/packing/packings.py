"""What the packing techniques share: requirements, and statistics of the batches that a run got.

Packing happens in the loader, so a profile shows nothing of it. Instead each micro batch is inspected on its
way to the model: shape, padding, number of documents, and whether they are isolated.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import Tensor

import rush.techniques.api.contract as api
from rush.data import Batch
from rush.data.packing import Packing
from rush.recipe import Knob
from rush.techniques.api.evidence import read_back

PACKINGS = ("bucket", "flatten", "pack_best_fit", "pack_concat", "pad")
WINDOW_MEANING = "documents that are packed together"

fine_tuning = api.Requirement(
    'it packs conversations: it needs objective.kind = "sft" (pretraining reads one token stream, '
    "preferences keep two answers together)",
    lambda machine, recipe: recipe.objective.kind == "sft",
)
more_than_one_row = api.Requirement(
    "it sorts the rows of a micro batch by length, so it needs batch.micro of 2 or more",
    lambda machine, recipe: recipe.micro > 1,
)


def others(name: str) -> tuple[str, ...]:
    """The packings that conflict with this one."""
    return tuple(other for other in PACKINGS if other != name)


def _shapes_seen(seen: api.Observation, knobs: api.Knobs) -> api.Proof:
    """The loader's packing has so many row lengths, and all that were seen are among them."""
    found, shapes = packing_stats(seen), int(knobs["shapes"])
    if found is None:
        return api.Proof(False, "no micro batch was seen")
    lengths = sorted({length for _, length in found.shapes})
    each = -(-found.sequence // shapes) if shapes else 1
    held = getattr(found.packing, "shapes", None)
    return api.Proof(
        held == shapes and all(length % each == 0 or length == found.sequence for length in lengths),
        f"row lengths {', '.join(map(str, lengths))} of up to {found.sequence}; the loader's packing has {held}",
    )


def _windows(seen: api.Observation) -> list[Knob]:
    found = packing_stats(seen)
    return [] if found is None else [getattr(found.packing, "window", "none")]


window_seen = read_back("window", "window of the loader's packing", _windows)
SHAPES = api.KnobRange(
    (0, 1, 2, 4, 8, 16, 32),
    "number of row lengths, each a fraction of batch.sequence (1: always batch.sequence); 0: exactly the longest row",
    _shapes_seen,
)


def few_shapes(name: str) -> api.Requirement:
    return api.Requirement(
        "every new length would recompile or recapture with compile or cuda_graph; with them set shapes to 1 … 32",
        lambda machine, recipe: (
            not api.used(recipe, name)
            or api.knob_of(recipe, name, "shapes", SHAPES.default) != 0
            or not api.used(recipe, "compile", "cuda_graph")
        ),
    )


@dataclass
class PackingStats:
    """Statistics of the micro batches."""

    sequence: int
    """Positions of a full row, on this rank."""
    packing: Packing
    """The loader's."""
    micro_batches: int = 0
    rows: int = 0
    tokens: int = 0
    padding: int = 0
    documents: int = 0
    isolated: int = 0
    """Micro batches whose documents are isolated."""
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
            f"tokens are padding, {self.documents / self.rows:.1f} documents per row; {recompiles} recompiles"
        )


def use_packing(build: api.Build, packing: Packing) -> PackingStats:
    """Set the loader's packing, and collect statistics of its micro batches."""
    seen = build.facts.note(PackingStats(build.recipe.batch.sequence // build.recipe.layout.cp, packing))
    build.loader_options["packing"] = packing

    def counted(inner: api.Pass) -> api.Pass:
        def passes(batch: Batch, loss_scale: Tensor) -> Tensor:
            seen.note(batch)
            return inner(batch, loss_scale)

        return passes

    build.pass_wrappers.append(counted)
    return seen


def allow_shapes(build: api.Build, shapes: int) -> None:
    """With compile, raise the recompile limit to the number of shapes, for training and validation."""
    if api.used(build.recipe, "compile"):
        import torch._dynamo

        limit = max(torch._dynamo.config.recompile_limit, 4 * shapes + 4)
        build.step_contexts.append(lambda: torch._dynamo.config.patch(recompile_limit=limit))


def packing_stats(seen: api.Observation) -> PackingStats | None:
    found = seen.facts.noted(PackingStats)
    return found if found is not None and found.micro_batches else None
