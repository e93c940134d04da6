"""The tokenizer and the chat template for the data, tested on the rows."""

from __future__ import annotations

from typing import Any

from rush.data.conversations.templates import find_template
from rush.data.conversations.turns import Conversation, Text
from rush.data.tokenizer import SMALLEST_BPE, Tokenizer, train_bpe_up_to
from rush.errors import DataError
from rush.start.decisions import Choice
from rush.start.inspect import MEASURED_LETTERS, LengthFacts, RowFacts, measure
from rush.start.model import StartModel


def choose_tokenizer(
    model: StartModel, rows: RowFacts, given: dict[str, Any]
) -> tuple[Tokenizer, int | None]:
    """The model's tokenizer, or one trained on the data, with its vocabulary if it is smaller than the model's."""
    if model.tokenizer is not None:
        return model.tokenizer, None
    texts = [_text_of(sample) for _, sample in rows.samples]
    wanted = int(given.get("data.vocab_size") or model.shape.vocab_size)
    reached = train_bpe_up_to(texts, wanted, MEASURED_LETTERS)
    if reached.vocab_size == wanted:
        return reached, None
    smaller = max(SMALLEST_BPE, int(0.8 * reached.vocab_size))  # what is held out is not learned from
    return train_bpe_up_to(texts, smaller, MEASURED_LETTERS), smaller


def _text_of(sample: Any) -> str:
    if isinstance(sample, Text):
        return sample.text
    turns = sample.turns if isinstance(sample, Conversation) else sample.prompt + sample.chosen
    return "\n".join(turn.content for turn in turns)


def choose_template(
    rows: RowFacts, tokenizer: Tokenizer, objective: str, given: dict[str, Any]
) -> tuple[Choice | None, LengthFacts]:
    """The model's own chat template if it supports training, else one of ours; with the resulting lengths."""
    if objective == "lm":
        return None, measure(rows, tokenizer, None)
    asked = given.get("data.template")
    if asked is not None:
        return Choice(asked, "given"), measure(rows, tokenizer, find_template(str(asked), tokenizer))
    ours = _usual_template(tokenizer)
    if tokenizer.chat_template is None:
        return ours, measure(rows, tokenizer, find_template(str(ours.value), tokenizer))
    try:
        return Choice("auto", "the model's own chat template"), measure(
            rows, tokenizer, find_template("auto", tokenizer)
        )
    except DataError as error:
        choice = Choice(
            ours.value, f"{ours.why}; the model's own chat template cannot be trained with here: {error}"
        )
        try:
            return choice, measure(rows, tokenizer, find_template(str(ours.value), tokenizer))
        except DataError as second:
            raise DataError(f"{error} Nor is {ours.value} one for these rows: {second}") from error


def _usual_template(tokenizer: Tokenizer) -> Choice:
    for mark, name in (("<|im_end|>", "chatml"), ("<|eot_id|>", "llama-3")):
        if mark in tokenizer.special_ids:
            return Choice(name, f"the tokenizer has {mark}, with which this template ends turns")
    return Choice("plain", "the model has no chat template; this one works with any vocabulary")
