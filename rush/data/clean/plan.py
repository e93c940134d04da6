"""From a pipeline to steps for the engine.

Stages that judge a document by itself are chained and need one reading of the data. A stage that compares
documents with each other (rare items, duplicates) needs its figures from all of them first: the pass before it
ends by gathering them, steps in between merge them, and the next pass begins by acting on them. So a pipeline with n such
stages reads its input n + 1 times and never writes a copy of it; between passes only the numbers of removed rows
are kept. A task is a unit of the input and always the same one, whoever runs it, so the result is the same too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rush.data.clean import counting, duplicates, filters
from rush.data.clean.failure import Guard
from rush.data.clean.output import WriteKept
from rush.data.clean.removal import Removals
from rush.data.clean.row_files import Inputs
from rush.data.clean.stages import (
    CleaningPipeline,
    ExactDuplicates,
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
    """One executor's work: blocks, run once for every task."""

    name: str
    blocks: list[Any]
    tasks: int


@dataclass(frozen=True)
class CleaningLayout:
    """Where things lie in the working folder."""

    folder: Path

    def of_stage(self, number: int, what: str) -> str:
        return str(self.folder / "stages" / f"{number:02d}" / what)

    def removed(self, number: int, late: bool = False) -> str:
        """Rows a stage removed; `late` for those it could only judge after seeing all others."""
        return self.of_stage(number, "removed" if late else "unfit")

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


ALONE: dict[type[Any], type[filters.StageFilter]] = {
    Words: filters.WordsFilter,
    Items: filters.ItemsFilter,
    Language: filters.LanguageFilter,
    Regex: filters.RegexFilter,
}


def plan(
    pipeline: CleaningPipeline, inputs: Inputs, layout: CleaningLayout, *, parquet: bool, examples: int
) -> list[Step]:
    """The passes over the data and the merges between them, in order. What comes after them is the joining."""
    inputs_file = inputs.save(layout.folder)
    units = len(inputs.units)
    steps: list[Step] = []
    dead: list[str] = [layout.unreadable]
    first = Removals(layout.unreadable, examples)
    blocks = [_reader(pipeline, inputs_file, layout, (), first)]
    names = pipeline.names()
    for number, stage in enumerate(pipeline.stage):
        removals = Removals(layout.removed(number), examples)
        dead.append(layout.removed(number))
        if isinstance(stage, Tokens):
            blocks.append(filters.TokensFilter(stage, pipeline, removals, layout.tokenizer(number)))
            continue
        if type(stage) in ALONE:
            blocks.append(ALONE[type(stage)](stage, pipeline, removals))
            continue
        gather, merges, act = _together(
            stage, number, pipeline, inputs_file, units, layout, removals, examples
        )
        *picks, last = gather
        name = f"reading for {names[number]}"
        steps.append(Step(name, [*blocks, *picks, Guard(layout.errors), last], units))
        steps += merges
        blocks = [_reader(pipeline, inputs_file, layout, tuple(dead), None), act]
        dead.append(layout.removed(number, late=True))
    writer = WriteKept(
        layout.parts, parquet and inputs.parquet, parquet and not inputs.parquet, layout.errors
    )
    steps.append(Step("writing what is kept", [*blocks, Guard(layout.errors), writer], units))
    return steps


def _reader(
    pipeline: CleaningPipeline,
    inputs_file: str,
    layout: CleaningLayout,
    dead: tuple[str, ...],
    first: Removals | None,
) -> filters.ReadRows:
    return filters.ReadRows(inputs_file, dead, pipeline.on_unreadable == "skip", first, layout.counts)


def _together(
    stage: Any,
    number: int,
    pipeline: CleaningPipeline,
    inputs_file: str,
    units: int,
    layout: CleaningLayout,
    removals: Removals,
    examples: int,
) -> tuple[list[Any], list[Step], Any]:
    """What gathers a stage's figures, what merges them, and what acts on them in the next pass."""
    late = layout.removed(number, late=True)

    def at(what: str) -> str:
        return layout.of_stage(number, what)

    if isinstance(stage, RareItems):
        gather = [counting.PickItems(stage, pipeline, removals), counting.CountItems(stage, at("counts"))]
        merge = counting.MergeCounts(stage, at("counts"), at("rare"))
        parts = counting.num_parts(units)
        act = counting.RareItemsFilter(stage, pipeline, Removals(late, examples), at("rare"), parts)
        return gather, [Step("adding up items", [merge], parts)], act
    if isinstance(stage, ExactDuplicates):
        config = duplicates.exact_config()
        gather = [
            duplicates.PickKey(stage, pipeline, removals),
            duplicates.ExactSignatures(at("signatures"), config),
        ]
        find = duplicates.FindExact(at("signatures"), at("found"), config)
        act = duplicates.exact_filter(at("found"), duplicates.ExactRemovals(late, examples))
        return gather, [Step("comparing hashes", [find], 1)], act
    assert isinstance(stage, NearDuplicates)
    gather = [
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
    return gather, merges, duplicates.near_filter(at("remove"), near)
