"""All that determines the prepared documents, validated before anything is read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rush.data.conversations.formats import FORMATS
from rush.data.conversations.rows import describe_rows
from rush.errors import RecipeError, nearest

TOO_LONG = ("error", "drop", "cut")
BAD_ROWS = ("error", "drop")


@dataclass(frozen=True)
class DocumentPreparation:
    """What to prepare. `vocab_size` is the model's, or with `tokenizer="train"` that of the tokenizer."""

    source: str = "python-docstrings"
    files: tuple[str, ...] = ()
    format: str = "auto"
    template: str = "auto"
    train_on: str = "completion"
    too_long: str = "error"
    sequence: int = 1024
    tokenizer: str = "train"
    vocab_size: int | None = None
    validation: float = 0.01
    limit: int | None = None
    paired: bool = False
    text_field: str = "text"
    bad_rows: str = "error"
    seed: int = 0
    tokenizer_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        choices = {
            "data.format": (self.format, ("auto", *FORMATS)),
            "data.too_long": (self.too_long, TOO_LONG),
            "data.bad_rows": (self.bad_rows, BAD_ROWS),
            "objective.train_on": (self.train_on, ("completion", "all")),
        }
        for key, (found, allowed) in choices.items():
            if found not in allowed:
                raise RecipeError(f"{key} is {found!r}; {nearest(found, allowed)}")
        if self.paired and self.format not in ("auto", "preference"):
            raise RecipeError(
                f"data.format is {self.format!r}, but preferences (objective.kind = 'dpo') need pairs of answers: "
                "set data.format to 'preference' or 'auto'."
            )
        if not self.paired and self.format == "preference":
            raise RecipeError(
                "data.format is 'preference', which is for objective.kind = 'dpo'; set the objective, or another format."
            )
        if not 0 <= self.validation < 1:
            raise RecipeError(
                f"data.validation is {self.validation}; it is a fraction: at least 0, less than 1."
            )
        if self.limit is not None and self.limit < 1:
            raise RecipeError(
                f"data.limit is {self.limit}; it counts rows and must be at least 1, or be left out."
            )
        if self.sequence < 2:
            raise RecipeError(f"batch.sequence is {self.sequence}; a conversation needs at least 2 tokens.")
        if self.tokenizer == "train" and self.vocab_size is None:
            raise RecipeError("data.tokenizer is 'train', which needs a vocabulary size.")

    def describe(self) -> dict[str, Any]:
        """All that determines the documents, except tokenizer and template."""
        asked = asdict(self)
        for name in ("source", "files", "limit", "tokenizer", "vocab_size", "tokenizer_bytes", "template"):
            del asked[name]
        return {"source": describe_rows(self.source, self.files, self.limit), **asked}
