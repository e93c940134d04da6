"""The prompt of a chat model and the stop tokens of its answer, for chat, evaluation, samples and export."""

from __future__ import annotations

from rush.data import Tokenizer
from rush.data.conversations import Conversation, encode, encode_prompt, find_template
from rush.data.conversations.turns import BadRow
from rush.errors import DataError

TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")


def answer_ends(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokens that end an answer: the end of text first, then the usual ends of a turn where the tokenizer has them, and what
    its chat template writes after an answer."""
    known = tokenizer.special_ids
    ends = {known[mark] for mark in TURN_ENDS if mark in known} | _written_end(tokenizer)
    return (tokenizer.eos_id, *sorted(ends - {tokenizer.eos_id}))


def _written_end(tokenizer: Tokenizer) -> set[int]:
    """The special token that the template puts after an answer: found as training finds it, in a conversation of two turns."""
    if tokenizer.chat_template is None:
        return set()
    tried = Conversation.of([{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}])
    try:
        found = encode(tried, tokenizer, find_template("auto", tokenizer))
    except (DataError, BadRow):  # a template that ends answers with plain text, or will not have these turns
        return set()
    return {[token for token, trained in zip(found.tokens, found.trained, strict=True) if trained][-1]}


def encode_question(tokenizer: Tokenizer, text: str) -> list[int]:
    """A question as the tokenizer's chat template has it, up to where the answer begins; as it stands where there is none."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(text) or [tokenizer.eos_id]
    asked = Conversation.of([{"role": "user", "content": text}])
    return encode_prompt(asked, tokenizer, find_template("auto", tokenizer))
