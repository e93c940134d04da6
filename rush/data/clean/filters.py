"""Stages that judge each document by itself, as datatrove filters, and the reading of rows before them.

A filter here answers with a sentence why a document goes, or with nothing. The sentence travels beside
datatrove's own bookkeeping, because that counts every reason apart and reasons name words and numbers.
This module imports datatrove at the top, because filters must be its subclasses; import it only where the
`corpus` extra is wanted.
"""

from __future__ import annotations

import functools
import re
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.filters.base_filter import BaseFilter

from rush.data.clean.fields import Missing, items_at, text_at
from rush.data.clean.language import identify
from rush.data.clean.removal import Removals, dead_rows
from rush.data.clean.row_files import FileRow, load_inputs, read_rows
from rush.data.clean.stages import CleaningPipeline, Items, Language, Regex, StagePart, Tokens, Words
from rush.data.pipeline import leave_with_parent
from rush.data.tokenizer import Tokenizer
from rush.errors import DataError
from rush.files import write_json_atomic


class ReadRows(PipelineStep):  # type: ignore[misc]
    """Rows of a unit that earlier passes left. The first pass judges what cannot be read, and counts."""

    name = "rows"
    type = "rush reader"

    def __init__(
        self, inputs_file: str, dead: tuple[str, ...], skip: bool, first: Removals | None, counts: str
    ) -> None:
        super().__init__()
        self.inputs_file = inputs_file
        self.dead = dead
        self.skip = skip
        self.first = first
        self.counts = counts

    def run(
        self, data: Iterable[Document] | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Document]:
        leave_with_parent()
        inputs = load_inputs(self.inputs_file)
        rows = read_rows(inputs.units[rank], inputs.labels, dead_rows(self.dead, rank))
        if self.first is None:
            for row in rows:
                assert isinstance(row, FileRow)  # what cannot be read is among the dead
                yield Document("", row.name, metadata={"row": row})
            return
        count = 0
        with self.first as removals:
            for row in rows:
                count += 1
                self.stat_update("documents")
                if isinstance(row, FileRow):
                    yield Document("", row.name, metadata={"row": row})
                    continue
                if not self.skip:
                    raise DataError(
                        f'{row.name}: {row.reason}. Mend or remove it, or set on_unreadable = "skip" in the '
                        "pipeline (or --skip-unreadable) to have such rows counted and left out."
                    )
                removals.add(rank, row.index, row.name, row.text, row.reason)
        write_json_atomic(Path(self.counts) / f"{rank:05d}.json", {"rows": count})


class StageFilter(BaseFilter):  # type: ignore[misc]
    """One stage: drops what `judge` gives a reason for, and treats missing fields as the pipeline says."""

    type = "rush stage"

    def __init__(self, stage: StagePart, pipeline: CleaningPipeline, removals: Removals) -> None:
        super().__init__(exclusion_writer=removals)
        self.stage: Any = stage
        self.pipeline_text = pipeline.text
        self.drop_missing = pipeline.on_missing == "drop"
        self.name = stage.label

    @abstractmethod
    def judge(self, row: FileRow, document: Document) -> str | None:
        """Why the document goes, or None."""

    def filter(self, doc: Document) -> bool:
        row: FileRow = doc.metadata["row"]
        try:
            reason = self.judge(row, doc)
        except Missing as missing:
            if not self.drop_missing:
                raise DataError(
                    f"{row.name}: no field {missing.field!r}, which the stage {self.name} looks at. Fields found: "
                    f"{', '.join(missing.found) or 'none'}. Name the right one in the pipeline, or set "
                    'on_missing = "drop" to have such documents counted and removed.'
                ) from None
            reason, doc.metadata["missing"] = str(missing), True
        doc.metadata["reason"] = reason
        return reason is None

    @property
    def field(self) -> str:
        return str(getattr(self.stage, "field", None) or self.pipeline_text)

    def text(self, row: FileRow) -> str:
        return text_at(row.values, self.field, row.name)


def outside(count: int, noun: str, low: int | None, high: int | None) -> str | None:
    """Why a count is refused, as a sentence's half: `3 words, fewer than 10`."""
    noun = noun if count != 1 else noun.removesuffix("s")
    if low is not None and count < low:
        return f"{count:,} {noun}, fewer than {low:,}"
    if high is not None and count > high:
        return f"{count:,} {noun}, more than {high:,}"
    return None


class WordsFilter(StageFilter):
    stage: Words

    def judge(self, row: FileRow, document: Document) -> str | None:
        return outside(len(self.text(row).split()), "words", self.stage.min, self.stage.max)


class TokensFilter(StageFilter):
    stage: Tokens

    def __init__(
        self, stage: Tokens, pipeline: CleaningPipeline, removals: Removals, tokenizer_folder: str
    ) -> None:
        super().__init__(stage, pipeline, removals)
        self.tokenizer_folder = tokenizer_folder

    def judge(self, row: FileRow, document: Document) -> str | None:
        ids = load_once(self.tokenizer_folder).encode(self.text(row), specials=False)
        return outside(len(ids), "tokens", self.stage.min, self.stage.max)


@functools.lru_cache(maxsize=4)
def load_once(folder: str) -> Tokenizer:
    return Tokenizer.load(folder)


class ItemsFilter(StageFilter):
    stage: Items

    def judge(self, row: FileRow, document: Document) -> str | None:
        items = items_at(row.values, self.field, row.name, self.stage.separator)
        return outside(len(items), "items", self.stage.min, self.stage.max)


class LanguageFilter(StageFilter):
    stage: Language

    def judge(self, row: FileRow, document: Document) -> str | None:
        language, confidence = identify(self.text(row))
        if language not in self.stage.languages:
            return f"language {language} ({confidence:.0%}), not {' or '.join(self.stage.languages)}"
        if confidence < self.stage.min_confidence:
            return f"language {language}, but only {confidence:.0%} sure"
        return None


class RegexFilter(StageFilter):
    stage: Regex

    def judge(self, row: FileRow, document: Document) -> str | None:
        text = self.text(row)
        if self.stage.must_match and not re.search(self.stage.must_match, text):
            return f"nothing matches {self.stage.must_match!r}"
        found = re.search(self.stage.must_not_match, text) if self.stage.must_not_match else None
        if found:
            return f"{found.group()[:80]!r} matches {self.stage.must_not_match!r}"
        return None
