"""What techniques note about a run while they are applied: for other techniques, for MFU, and for the evidence.

A fact that others read is a field of `Facts`. What a technique notes for its own evidence is an object of a class of its own,
`build.facts.note(Moved())` in `apply` and `seen.facts.noted(Moved)` in `evidence`; techniques outside of rush do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from torch import nn

from rush.models import Decoder
from rush.parallel.pipeline import Pipeline

T = TypeVar("T")


@dataclass(frozen=True)
class CompileCounts:
    """What torch.compile has done in this process so far."""

    graphs: int = 0
    graph_breaks: int = 0
    recompiles: int = 0

    def __sub__(self, before: CompileCounts) -> CompileCounts:
        return CompileCounts(
            self.graphs - before.graphs,
            self.graph_breaks - before.graph_breaks,
            self.recompiles - before.recompiles,
        )


@dataclass(frozen=True)
class AdapterFacts:
    """Adapters on a frozen model."""

    model: Decoder
    base: int
    """Parameters of the model without adapters."""
    trained: int
    layers: int
    widths: frozenset[tuple[int, int]]
    """(out, in) features of the frozen linear layers."""


@dataclass(frozen=True)
class FsdpFacts:
    """A model sharded by FSDP."""

    model: Decoder
    tops: Sequence[nn.Module]
    """What was sharded: the model, or this rank's pipeline stages."""
    ranks: int
    roots: int
    """Units besides the blocks, one for each pipeline stage."""
    trained_roots: int


@dataclass(frozen=True)
class TpFacts:
    """Linear layers sharded over the ranks of tensor parallelism."""

    ranks: int
    model: Decoder
    stages: Sequence[nn.Module]


@dataclass
class PpFacts:
    """This rank's share of a pipeline."""

    split: list[str]
    """Which rank has which blocks, in words."""
    blocks: list[int]
    num_layers: int
    """Blocks of the whole model."""
    sequence: int
    """Positions of a row, for which the split is even."""
    pipeline: Pipeline | None = None
    """Set once the run is built."""


@dataclass
class Facts:
    """The facts of one run. The defaults are those of the plain baseline."""

    rate_dtype: str | None = None
    """The dtype whose peak rate is 100 % of MFU; None: that of the matmul operands."""
    operand_dtype: str | None = None
    """The dtype that a technique casts matmul operands to, where that is not the compute dtype."""
    padded_vocab_size: int | None = None
    """The width of the LM head's matmuls where it is not the vocabulary: padded, or this rank's vocab shard."""
    matmuls_saved: int = 0
    """Matmuls of a forward pass that joined layers save."""
    state_bytes_per_parameter: float | None = None
    """The optimizer technique's state, in bytes per parameter, or an upper bound."""
    compiled_before: CompileCounts | None = None
    """The counts when `compile` was applied."""
    adapters: AdapterFacts | None = None
    fsdp: FsdpFacts | None = None
    tp: TpFacts | None = None
    pp: PpFacts | None = None
    _notes: dict[type, object] = field(default_factory=dict)

    def note(self, note: T) -> T:
        """Keep an object for a technique's own evidence, one of each class."""
        self._notes[type(note)] = note
        return note

    def noted(self, kind: type[T]) -> T | None:
        """The object of this class that a technique noted."""
        found = self._notes.get(kind)
        return found if isinstance(found, kind) else None
