"""The steps of a cleaning pipeline for datatrove.

Stages that decide on single documents are chained in one pass over the data. A stage that compares documents (rare items,
duplicates) needs statistics of all of them: the pass before it ends by collecting them, merge steps combine them, and the next
pass starts by applying them. So a pipeline with n such stages reads its input n + 1 times and writes no copy of it; between
passes only the indices of removed rows are kept. A task is always the same unit of the input, so the result is the same too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rush.data.clean import counting, duplicates, filters
from rush.data.clean.failure import RecordErrors
from rush.data.clean.identity_filter import ApplyEdits, IdentityFilter
from rush.data.clean.output import WriteKept
from rush.data.clean.removal import Removals
from rush.data.clean.row_files import Inputs
from rush.data.clean.stages import (
    CleaningPipeline,
    ExactDuplicates,
    Identity,
    Items,
    Language,
    NearDuplicates,
    RareItems,
    Regex,
    Tokens,
    Words,
)


@dataclass(frozen=True)
class Step:
    """The blocks of one executor, run once per task."""

    name: str
    blocks: list[Any]
    tasks: int


@dataclass(frozen=True)
class CleaningLayout:
    """Paths in the working folder."""

    folder: Path

    def of_stage(self, number: int, what: str) -> str:
        return str(self.folder / "stages" / f"{number:02d}" / what)

    def removed(self, number: int, late: bool = False) -> str:
        """Rows that a stage removed; `late`: in the pass after its statistics were merged."""
        return self.of_stage(number, "removed" if late else "unfit")

    def edited(self, number: int) -> str:
        """Rows that a stage changed."""
        return self.of_stage(number, "edited")

    @property
    def unreadable(self) -> str:
        return str(self.folder / "unreadable")

    @property
    def counts(self) -> str:
        return str(self.folder / "counts")

    @property
    def errors(self) -> str:
        return str(self.folder / "errors")

    @property
    def parts(self) -> str:
        return str(self.folder / "parts")

    def tokenizer(self, number: int) -> str:
        return str(self.folder / "tokenizers" / f"{number:02d}")


PER_DOCUMENT: dict[type[Any], type[filters.StageFilter]] = {
    Words: filters.WordsFilter,
    Items: filters.ItemsFilter,
    Language: filters.LanguageFilter,
    Regex: filters.RegexFilter,
}


def plan(
    pipeline: CleaningPipeline, inputs: Inputs, layout: CleaningLayout, *, parquet: bool, examples: int
) -> list[Step]:
    """The passes over the data and the merges between them, in order; the join comes after them."""
    inputs_file = inputs.save(layout.folder)
    units = len(inputs.units)
    steps: list[Step] = []
    removed: list[str] = [layout.unreadable]
    first = Removals(layout.unreadable, examples)
    blocks = [_reader(pipeline, inputs_file, layout, (), first)]
    names = pipeline.names()
    editing: list[Identity] = []
    for number, stage in enumerate(pipeline.stage):
        removals = Removals(layout.removed(number), examples)
        removed.append(layout.removed(number))
        if isinstance(stage, Tokens):
            blocks.append(filters.TokensFilter(stage, pipeline, removals, layout.tokenizer(number)))
            continue
        if isinstance(stage, Identity):
            edits = Removals(layout.edited(number), examples) if stage.drop == "turn" else None
            blocks.append(IdentityFilter(stage, pipeline, removals, edits))
            editing += [stage] if edits else []
            continue
        if type(stage) in PER_DOCUMENT:
            blocks.append(PER_DOCUMENT[type(stage)](stage, pipeline, removals))
            continue
        collect, merges, apply = _corpus_stage(
            stage, number, pipeline, inputs_file, units, layout, removals, examples
        )
        *picks, last = collect
        name = f"collecting for {names[number]}"
        steps.append(Step(name, [*blocks, *picks, RecordErrors(layout.errors), last], units))
        steps += merges
        blocks = [_reader(pipeline, inputs_file, layout, tuple(removed), None)]
        blocks += [ApplyEdits(tuple(editing)), apply] if editing else [apply]
        removed.append(layout.removed(number, late=True))
    writer = WriteKept(
        layout.parts, parquet and inputs.parquet, parquet and not inputs.parquet, layout.errors
    )
    steps.append(Step("writing kept rows", [*blocks, RecordErrors(layout.errors), writer], units))
    return steps


def _reader(
    pipeline: CleaningPipeline,
    inputs_file: str,
    layout: CleaningLayout,
    removed: tuple[str, ...],
    first: Removals | None,
) -> filters.ReadRows:
    return filters.ReadRows(inputs_file, removed, pipeline.on_unreadable == "skip", first, layout.counts)


def _corpus_stage(
    stage: Any,
    number: int,
    pipeline: CleaningPipeline,
    inputs_file: str,
    units: int,
    layout: CleaningLayout,
    removals: Removals,
    examples: int,
) -> tuple[list[Any], list[Step], Any]:
    """Blocks that collect a stage's statistics, steps that merge them, and the block that applies them in the next pass."""
    late = layout.removed(number, late=True)

    def at(what: str) -> str:
        return layout.of_stage(number, what)

    if isinstance(stage, RareItems):
        collect = [counting.PickItems(stage, pipeline, removals), counting.CountItems(stage, at("counts"))]
        merge = counting.MergeCounts(stage, at("counts"), at("rare"))
        parts = counting.num_parts(units)
        apply = counting.RareItemsFilter(stage, pipeline, Removals(late, examples), at("rare"), parts)
        return collect, [Step("merging item counts", [merge], parts)], apply
    if isinstance(stage, ExactDuplicates):
        config = duplicates.exact_config()
        collect = [
            duplicates.PickKey(stage, pipeline, removals),
            duplicates.ExactSignatures(at("signatures"), config),
        ]
        find = duplicates.FindExact(at("signatures"), at("found"), config)
        apply = duplicates.exact_filter(at("found"), duplicates.ExactRemovals(late, examples))
        return collect, [Step("comparing hashes", [find], 1)], apply
    assert isinstance(stage, NearDuplicates)
    collect = [
        duplicates.PickText(stage, pipeline, removals),
        duplicates.NearSignatures(at("signatures"), at("places"), stage),
    ]
    buckets = duplicates.NearBuckets(at("signatures"), at("pairs"), config=duplicates.near_config(stage))
    clusters = duplicates.cluster(at("pairs"), at("clusters"), stage)
    keep = duplicates.KeepFirst(at("clusters"), at("remove"), units)
    merges = [
        Step("comparing signatures", [buckets], stage.buckets),
        Step("clustering", [clusters, keep], 1),
    ]
    near = duplicates.NearRemovals(late, examples, at("remove"), at("places"), inputs_file)
    return collect, merges, duplicates.near_filter(at("remove"), near)
