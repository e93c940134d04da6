"""Multiple choice as in HellaSwag: which ending is most likely?

Each ending is scored by its summed log-probability after the context. `acc` is how often the most likely one is right;
`acc_norm` divides by the characters of each ending first, because longer endings are less likely. Both are
lm-evaluation-harness's metrics, including how context and ending are concatenated (Gao et al. 2024,
doi:10.5281/zenodo.12608602), so that results are comparable.

A row is one question in JSON: HellaSwag's fields (`ctx` or `ctx_a` and `ctx_b`, `endings`, `label`, and optionally
`activity_label`) or `query`, `choices`, `gold`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rush.data import Tokenizer
from rush.errors import DataError
from rush.evaluate.measures import Share, inputs_and_labels, proportion, score_rows
from rush.models import Decoder


@dataclass(frozen=True)
class Question:
    context: str
    choices: tuple[str, ...]
    gold: int


@dataclass(frozen=True)
class Accuracy:
    acc: Share
    acc_norm: Share


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """The questions of a JSONL file, validated."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path} cannot be read as a file of questions ({error}); give a JSONL file in UTF-8."
        ) from None
    found = [
        _question(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not found:
        raise DataError(f"{path} holds no question; each line is a JSON object with ctx, endings and label.")
    return found[:limit]


def _question(line: str, where: str) -> Question:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error}); each line is one question as a JSON object.") from None
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: found {type(row).__name__}, wanted a JSON object with ctx, endings and label."
        )
    context = _context(row)
    choices = row.get("endings", row.get("choices"))
    gold = row.get("label", row.get("gold"))
    for name, value in (
        ("ctx (or query)", context),
        ("endings (or choices)", choices),
        ("label (or gold)", gold),
    ):
        if value is None or value == "" or value == []:
            raise DataError(
                f"{where}: {name} is missing or empty; a question has ctx, endings and label (or query, choices, gold). "
                f"Found: {', '.join(map(str, row))}."
            )
    if not isinstance(choices, list) or not all(isinstance(choice, str) and choice for choice in choices):
        raise DataError(
            f"{where}: endings must be a list of texts that are not empty; found {str(choices)[:60]!r}."
        )
    if not str(gold).isdecimal() or int(str(gold)) >= len(choices):
        raise DataError(f"{where}: label is {gold!r}; it names an ending, 0 to {len(choices) - 1}.")
    hellaswag = "endings" in row
    clean = tuple(_clean(choice) for choice in choices) if hellaswag else tuple(choices)
    assert context is not None
    return Question(_clean(context) if hellaswag else context, clean, int(str(gold)))


def _context(row: dict[str, Any]) -> str | None:
    if "query" in row or "endings" not in row:
        found = row.get("query", row.get("ctx"))
        return found if isinstance(found, str) else None
    if isinstance(row.get("ctx_a"), str) and isinstance(row.get("ctx_b"), str):
        context = f"{row['ctx_a']} {row['ctx_b'].capitalize()}"
    else:
        context = row.get("ctx", "")
    if not isinstance(context, str) or not context.strip():
        return None
    topic = row.get("activity_label")
    return f"{topic}: {context}" if isinstance(topic, str) and topic else context


def _clean(text: str) -> str:
    """Remove WikiHow's markup, as lm-evaluation-harness does."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def encode_choice(tokenizer: Tokenizer, context: str, choice: str) -> tuple[list[int], int]:
    """The tokens of context, space and choice, and the index of the choice's first token.

    They are encoded together, as the tokenizer would split them; trailing spaces of the context belong to the choice.
    """
    kept = context.rstrip()
    continuation = context[len(kept) :] + " " + choice
    begin = tokenizer.encode(kept, specials=False)
    whole = tokenizer.encode(kept + continuation, specials=False)
    if not begin:
        start = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        return [start, *whole], 1
    return whole, len(begin)


def multiple_choice(
    model: Decoder, tokenizer: Tokenizer, questions: Sequence[Question], size: int = 16
) -> Accuracy:
    """Accuracy over all questions; `size` is the batch size in rows."""
    rows: list[tuple[list[int], list[int]]] = []
    for question in questions:
        for choice in question.choices:
            tokens, begin = encode_choice(tokenizer, question.context, choice)
            cut = max(0, len(tokens) - 1 - model.shape.context)  # truncate on the left, as the harness does
            rows.append(inputs_and_labels(tokens[cut:], max(1, begin - cut)))
    scores = score_rows(model, rows, size)
    plain: list[float] = []
    normed: list[float] = []
    for question in questions:
        mine, scores = scores[: len(question.choices)], scores[len(question.choices) :]
        by_length = [score / len(choice) for score, choice in zip(mine, question.choices, strict=True)]
        plain.append(float(mine.index(max(mine)) == question.gold))
        normed.append(float(by_length.index(max(by_length)) == question.gold))
    return Accuracy(proportion(plain), proportion(normed))
