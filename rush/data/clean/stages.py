"""The stages of a cleaning pipeline, one TOML table each.

Unknown keys are refused, and so is a stage that cannot remove anything. Stages are implemented in `filters` (by document),
`counting` and `duplicates` (by comparison of all documents, which takes one more pass over the data).
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StagePart(Part):
    name: Annotated[str, Field(min_length=1, max_length=60)] | None = None
    """Name in the report; default: the kind."""

    @property
    def label(self) -> str:
        return self.name or str(self.model_dump()["kind"])


class Range(StagePart):
    min: Count | None = None
    max: Count | None = None

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.min is None and self.max is None:
            raise ValueError("neither min nor max is given, so it would remove nothing; give one of them")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min is {self.min} and max is {self.max}; min must not be larger")
        return self


class Words(Range):
    """Length in words, separated by white space."""

    kind: Literal["words"]
    field: str | None = None


class Tokens(Range):
    """Length in tokens of a tokenizer, by name or path."""

    kind: Literal["tokens"]
    field: str | None = None
    tokenizer: str


class Items(Range):
    """Number of items in a list."""

    kind: Literal["items"]
    field: str
    separator: Annotated[str, Field(min_length=1)] | None = None


class RareItems(StagePart):
    """Documents with an item that occurs fewer than `min_count` times in all documents that reach this stage."""

    kind: Literal["rare_items"]
    field: str
    min_count: Annotated[int, Field(ge=2)]
    count: Literal["occurrences", "documents"] = "occurrences"
    ignore_case: bool = False
    separator: Annotated[str, Field(min_length=1)] | None = None


class Language(StagePart):
    """Language of a text, identified by py3langid."""

    kind: Literal["language"]
    field: str | None = None
    languages: Annotated[list[str], Field(min_length=1)]
    min_confidence: Annotated[float, Field(ge=0, le=1)] = 0.0


class Regex(StagePart):
    """A regular expression that must be found in a text, or must not."""

    kind: Literal["regex"]
    field: str | None = None
    must_match: str | None = None
    must_not_match: str | None = None

    @model_validator(mode="after")
    def _expressions(self) -> Self:
        given = {"must_match": self.must_match, "must_not_match": self.must_not_match}
        if not any(given.values()):
            raise ValueError("neither must_match nor must_not_match is given; give one of them")
        for key, expression in given.items():
            try:
                re.compile(expression or "")
            except re.error as error:
                raise ValueError(
                    f"{key} is {expression!r}, which is not a regular expression ({error}); "
                    "write TOML's single quotes around it, so that backslashes stay"
                ) from None
        return self


class Identity(StagePart):
    """Answers that claim to be another maker's model, in the first person."""

    kind: Literal["identity"]
    field: Annotated[str, Field(min_length=1)] = "messages"
    """A conversation, or the text of an answer."""
    own: list[Annotated[str, Field(min_length=1)]] = []
    """Names and makers that answers may claim."""
    also: list[Annotated[str, Field(min_length=2)]] = []
    """Further names and makers that they may not."""
    drop: Literal["row", "turn"] = "row"
    """Remove the row, or only the exchange with the claim; a row without another answer goes in any case."""


class ExactDuplicates(StagePart):
    """Documents equal to an earlier one in `fields` (["*"]: the whole row)."""

    kind: Literal["exact_duplicates"]
    fields: Annotated[list[str], Field(min_length=1)] | None = None
    ignore_case: bool = False
    ignore_space: bool = False


class NearDuplicates(StagePart):
    """Documents that share most of their word n-grams with an earlier one (MinHash)."""

    kind: Literal["near_duplicates"]
    field: str | None = None
    ngram: Positive = 5
    buckets: Annotated[int, Field(ge=1, le=1000)] = 14
    hashes_per_bucket: Annotated[int, Field(ge=1, le=100)] = 8
    ignore_numbers: bool = False
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1


Stage = Annotated[
    Words | Tokens | Items | RareItems | Language | Regex | Identity | ExactDuplicates | NearDuplicates,
    Field(discriminator="kind"),
]
KINDS: dict[str, type[StagePart]] = {
    "words": Words,
    "tokens": Tokens,
    "items": Items,
    "rare_items": RareItems,
    "language": Language,
    "regex": Regex,
    "identity": Identity,
    "exact_duplicates": ExactDuplicates,
    "near_duplicates": NearDuplicates,
}


class CleaningPipeline(Part):
    """A cleaning pipeline: stages in order, and what to do with missing fields and unreadable rows."""

    text: Annotated[str, Field(min_length=1)] = "text"
    """The text field of stages that do not name their own."""
    on_missing: Literal["error", "drop"] = "error"
    on_unreadable: Literal["error", "skip"] = "error"
    stage: Annotated[list[Stage], Field(min_length=1)]

    def names(self) -> list[str]:
        """The names of the stages: as given, else the kind, numbered if it occurs more than once."""
        kinds = [stage.kind for stage in self.stage if stage.name is None]
        taken: list[str] = []
        for stage in self.stage:
            earlier = sum(1 for name in taken if name == stage.kind or name.startswith(f"{stage.kind} "))
            numbered = f"{stage.kind} {earlier + 1}" if kinds.count(stage.kind) > 1 else stage.kind
            taken.append(stage.name or numbered)
        return taken

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = self.names()
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two stages are called {name!r}; give each its own name")
        return self
