"""The stage `identity`: removes conversations, or only exchanges, in which an answer claims another maker's identity.

An exchange is a user's turn and everything up to the next one: a question without its answer is not an
example, nor is an answer without its question. Removing exchanges changes the row, which no other stage does.
A later pass reads the original row from the file: `ApplyEdits` applies the same change again there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from rush.data.clean.fields import Missing, kind_of, value_at
from rush.data.clean.filters import StageFilter
from rush.data.clean.identity import find_claim
from rush.data.clean.removal import Removals
from rush.data.clean.row_files import FileRow
from rush.data.clean.stages import CleaningPipeline, Identity
from rush.errors import DataError

ANSWERS = {"assistant", "gpt", "model", "bot", "chatgpt", "ai"}
USERS = {"user", "human", "prompter", "customer"}


@dataclass(frozen=True)
class Found:
    """A claim in a row: its text, and the remaining turns without the exchanges that contain one (None: no answer remains)."""

    claim: str
    left: list[Any] | None


class IdentityFilter(StageFilter):
    stage: Identity

    def __init__(
        self, stage: Identity, pipeline: CleaningPipeline, removals: Removals, edits: Removals | None
    ) -> None:
        super().__init__(stage, pipeline, removals)
        self.edits = edits
        self.unit = 0

    def run(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        self.unit = rank
        if self.edits is None:
            yield from super().run(data, rank, world_size)
            return
        with self.edits:
            yield from super().run(data, rank, world_size)

    def removal_reason(self, row: FileRow, document: Document) -> str | None:
        found = find(row, self.stage)
        if found is None:
            return None
        reason = f"an answer claims {found.claim[:80]!r}"
        if found.left is None or self.edits is None:
            return reason
        self.edits.add(self.unit, row.index, row.name, row.values, reason)
        edit(row, self.stage.field, found.left)
        return None


class ApplyEdits(PipelineStep):  # type: ignore[misc]
    """Changes the rows of a later pass as the stages before it did."""

    name = "edited rows"
    type = "rush reader"

    def __init__(self, stages: tuple[Identity, ...]) -> None:
        super().__init__()
        self.stages = stages

    def run(
        self, data: Iterable[Document] | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Document]:
        for document in data or ():
            row = document.metadata["row"]
            for stage in self.stages:
                found = find(row, stage)
                if found is not None and found.left is not None:
                    edit(row, stage.field, found.left)
            yield document


def find(row: FileRow, stage: Identity) -> Found | None:
    value = value_at(row.values, stage.field)
    if isinstance(value, str):
        claim = find_claim(value, stage.own, stage.also)
        return Found(claim, None) if claim else None
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise DataError(
            f"{row.name}: {stage.field!r} holds {kind_of(value)}, expected a conversation (a list of turns) or the text of "
            "an answer; name another field in the pipeline."
        )
    first, left = None, []
    for exchange in exchanges(value, row.name, stage.field):
        claims = [find_claim(said, stage.own, stage.also) for said in answers(exchange)]
        claim = next((one for one in claims if one), None)
        first = first or claim
        left += [] if claim else exchange
    if first is None:
        return None
    return Found(first, left if any(role(turn) in ANSWERS for turn in left) else None)


def exchanges(turns: list[dict[str, Any]], name: str, field: str) -> Iterator[list[dict[str, Any]]]:
    """The turns before the first user's turn, then every user's turn with the turns after it."""
    held: list[dict[str, Any]] = []
    for number, turn in enumerate(turns):
        if role(turn) is None:
            raise Missing(f"{field}.role", turn)
        if role(turn) in USERS and held and (role(held[-1]) not in USERS or number == 0):
            yield held
            held = []
        held.append(turn)
    yield held


def role(turn: dict[str, Any]) -> str | None:
    said = turn.get("role", turn.get("from"))
    return said.casefold() if isinstance(said, str) else None


def answers(exchange: list[dict[str, Any]]) -> Iterator[str]:
    for turn in exchange:
        if role(turn) not in ANSWERS:
            continue
        content = turn.get("content", turn.get("value"))
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(text, str):
                yield text


def edit(row: FileRow, field: str, left: list[Any]) -> None:
    """Give the row other turns; it is written from its values now."""
    row.values = _with(row.values, field, left)
    row.line = None
    row.edited = True


def _with(table: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    if path in table:
        return {**table, path: value}
    head, _, rest = path.partition(".")
    return {**table, head: _with(table[head], rest, value)}
