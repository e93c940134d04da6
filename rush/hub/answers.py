"""Prompts of a chat model and the stop tokens of its answers."""

from __future__ import annotations

from rush.data import Tokenizer
from rush.data.conversations import Conversation, encode, encode_prompt, find_template
from rush.data.conversations.turns import BadRow
from rush.errors import DataError

TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")


def answer_stop_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Stop tokens of an answer: end-of-text first, then the usual end-of-turn tokens that the tokenizer has, and the one that
    its chat template writes."""
    known = tokenizer.special_ids
    ends = {known[mark] for mark in TURN_ENDS if mark in known} | _template_end(tokenizer)
    return (tokenizer.eos_id, *sorted(ends - {tokenizer.eos_id}))


def _template_end(tokenizer: Tokenizer) -> set[int]:
    """The special token that the template writes after an answer, found as in training, in a conversation of two turns."""
    if tokenizer.chat_template is None:
        return set()
    tried = Conversation.of([{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}])
    try:
        found = encode(tried, tokenizer, find_template("auto", tokenizer))
    except (DataError, BadRow):  # the template ends answers with plain text, or refuses these turns
        return set()
    return {[token for token, trained in zip(found.tokens, found.trained, strict=True) if trained][-1]}


def encode_question(tokenizer: Tokenizer, text: str) -> list[int]:
    """A user turn with the generation prompt, by the tokenizer's chat template; the bare text without a template."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(text) or [tokenizer.eos_id]
    asked = Conversation.of([{"role": "user", "content": text}])
    return encode_prompt(asked, tokenizer, find_template("auto", tokenizer))
