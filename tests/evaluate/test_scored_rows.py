"""Which tokens of a question are scored: those of the choice, all of them and no other, however long the context is.

An accuracy of a few questions hides most mistakes here: what every choice of a question shares moves no ranking.
"""

from __future__ import annotations

import pytest

from rush.data import train_bpe
from rush.data.batch import IGNORED
from rush.evaluate import multiple_choice as module
from rush.evaluate.multiple_choice import Question, encode_choice, multiple_choice
from rush.models import Decoder, build_model, shape_of
from tests.evaluate.test_evaluate import TEXT

Rows = list[tuple[list[int], list[int]]]
CONTEXTS = {"short": "the quick brown", "empty": "", "long": "cat " * 400 + "fox"}
CHOICES = ("fox jumps", "sleeps under the old apple tree")


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_tokens_of_a_choice_are_scored_and_no_other(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Rows = []

    def score(model: Decoder, rows: Rows, size: int) -> list[float]:
        seen.extend(rows)
        return [0.0] * len(rows)

    monkeypatch.setattr(module, "score_rows", score)
    tokenizer, model = train_bpe([TEXT], 300), build_model(shape_of("tiny"))
    multiple_choice(model, tokenizer, [Question(CONTEXTS[name], CHOICES, 0)])
    assert len(seen) == 2
    for (tokens, labels), choice in zip(seen, CHOICES, strict=True):
        whole, begin = encode_choice(tokenizer, CONTEXTS[name], choice)
        assert tokens == whole[:-1][-model.shape.context :], "the end of the row, as much as the model reads"
        assert [label for label in labels if label != IGNORED] == whole[begin:]
        assert labels[-1] == whole[-1]
        assert len(labels) == len(tokens)
