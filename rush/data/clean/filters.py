"""Stages that decide on each document by itself, as datatrove filters, and the row reader.

A filter returns the reason for removing a document, or None. Reasons are kept apart from datatrove's statistics, which count
every distinct reason, and these have words and numbers in them. This module imports datatrove, whose classes it subclasses:
import it only with the `corpus` extra.
"""

from __future__ import annotations

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
from rush.data.clean.removal import Removals, removed_rows
from rush.data.clean.row_files import FileRow, load_inputs, read_rows
from rush.data.clean.stages import CleaningPipeline, Items, Language, Regex, StagePart, Tokens, Words
from rush.data.pipeline import exit_with_parent
from rush.data.preparation_unit import cached_tokenizer
from rush.errors import DataError
from rush.files import write_json_atomic


class ReadRows(PipelineStep):  # type: ignore[misc]
    """Reads the rows of a unit that earlier passes kept. The first pass counts them and handles unreadable ones."""

    name = "rows"
    type = "rush reader"

    def __init__(
        self, inputs_file: str, removed: tuple[str, ...], skip: bool, first: Removals | None, counts: str
    ) -> None:
        super().__init__()
        self.inputs_file = inputs_file
        self.removed = removed
        self.skip = skip
        self.first = first
        self.counts = counts

    def run(
        self, data: Iterable[Document] | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Document]:
        exit_with_parent()
        inputs = load_inputs(self.inputs_file)
        rows = read_rows(inputs.units[rank], inputs.labels, removed_rows(self.removed, rank))
        if self.first is None:
            for row in rows:
                assert isinstance(row, FileRow)  # unreadable rows were removed
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
                        f'{row.name}: {row.reason}. Fix or remove it, or set on_unreadable = "skip" in the '
                        "pipeline (or --skip-unreadable) to count and skip such rows."
                    )
                removals.add(rank, row.index, row.name, row.text, row.reason)
        write_json_atomic(Path(self.counts) / f"{rank:05d}.json", {"rows": count})


class StageFilter(BaseFilter):  # type: ignore[misc]
    """One stage: removes documents that `removal_reason` gives a reason for, and handles missing fields by `on_missing`."""

    type = "rush stage"

    def __init__(self, stage: StagePart, pipeline: CleaningPipeline, removals: Removals) -> None:
        super().__init__(exclusion_writer=removals)
        self.stage: Any = stage
        self.pipeline_text = pipeline.text
        self.drop_missing = pipeline.on_missing == "drop"
        self.name = stage.label

    @abstractmethod
    def removal_reason(self, row: FileRow, document: Document) -> str | None:
        """Why the document is removed, or None."""

    def filter(self, doc: Document) -> bool:
        row: FileRow = doc.metadata["row"]
        try:
            reason = self.removal_reason(row, doc)
        except Missing as missing:
            if not self.drop_missing:
                raise DataError(
                    f"{row.name}: no field {missing.field!r}, which the stage {self.name} needs. Fields found: "
                    f"{', '.join(missing.found) or 'none'}. Name the right one in the pipeline, or set "
                    'on_missing = "drop" to count and remove such documents.'
                ) from None
            reason, doc.metadata["missing"] = str(missing), True
        doc.metadata["reason"] = reason
        return reason is None

    @property
    def field(self) -> str:
        return str(getattr(self.stage, "field", None) or self.pipeline_text)

    def text(self, row: FileRow) -> str:
        return text_at(row.values, self.field, row.name)


def out_of_range(count: int, noun: str, low: int | None, high: int | None) -> str | None:
    """Why a count is out of range, as in `3 words, fewer than 10`."""
    noun = noun if count != 1 else noun.removesuffix("s")
    if low is not None and count < low:
        return f"{count:,} {noun}, fewer than {low:,}"
    if high is not None and count > high:
        return f"{count:,} {noun}, more than {high:,}"
    return None


class WordsFilter(StageFilter):
    stage: Words

    def removal_reason(self, row: FileRow, document: Document) -> str | None:
        return out_of_range(len(self.text(row).split()), "words", self.stage.min, self.stage.max)


class TokensFilter(StageFilter):
    stage: Tokens

    def __init__(
        self, stage: Tokens, pipeline: CleaningPipeline, removals: Removals, tokenizer_folder: str
    ) -> None:
        super().__init__(stage, pipeline, removals)
        self.tokenizer_folder = tokenizer_folder

    def removal_reason(self, row: FileRow, document: Document) -> str | None:
        ids = cached_tokenizer(self.tokenizer_folder).encode(self.text(row), specials=False)
        return out_of_range(len(ids), "tokens", self.stage.min, self.stage.max)


class ItemsFilter(StageFilter):
    stage: Items

    def removal_reason(self, row: FileRow, document: Document) -> str | None:
        items = items_at(row.values, self.field, row.name, self.stage.separator)
        return out_of_range(len(items), "items", self.stage.min, self.stage.max)


class LanguageFilter(StageFilter):
    stage: Language

    def removal_reason(self, row: FileRow, document: Document) -> str | None:
        language, confidence = identify(self.text(row))
        if language not in self.stage.languages:
            return f"language {language} ({confidence:.0%}), not {' or '.join(self.stage.languages)}"
        if confidence < self.stage.min_confidence:
            return f"language {language}, but a confidence of only {confidence:.0%}"
        return None


class RegexFilter(StageFilter):
    stage: Regex

    def removal_reason(self, row: FileRow, document: Document) -> str | None:
        text = self.text(row)
        if self.stage.must_match and not re.search(self.stage.must_match, text):
            return f"nothing matches {self.stage.must_match!r}"
        found = re.search(self.stage.must_not_match, text) if self.stage.must_not_match else None
        if found:
            return f"{found.group()[:80]!r} matches {self.stage.must_not_match!r}"
        return None
