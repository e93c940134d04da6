"""Rows with tools, calls, results and thoughts are trained on as the model's template writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

from rush.data import Tokenizer
from rush.data.conversations import Conversation, encode, encode_prompt, find_template
from rush.data.conversations.formats import read_fields
from rush.data.conversations.turns import BadRow
from tests.data.chat_templates import LLAMA, MISTRAL, QWEN

MARKS = ("<s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "now <|im_end|>", "parameters": {"type": "object"}},
    }
]
ASKED = {"role": "user", "content": "the fox?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "abc123456",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Ulm"}'},
        }
    ],
}
RESULT = {"role": "tool", "content": "21 <|im_end|> <|eot_id|>", "tool_call_id": "abc123456"}
ANSWER = {"role": "assistant", "content": "the quick fox"}


@pytest.fixture(scope="module")
def marked(tokenizer: Tokenizer) -> Tokenizer:
    core = tokenizers.Tokenizer.from_str(tokenizer.json_text)
    core.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in MARKS])
    return Tokenizer(core.to_str(), tokenizer.eos_token, "<s>")


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    return Tokenizer(tokenizer.json_text, tokenizer.eos_token, tokenizer.bos_token, template)


def read(*messages: dict[str, Any], **row: Any) -> Conversation:
    sample, unused = read_fields({"messages": list(messages), **row}, "chat", paired=False)
    assert isinstance(sample, Conversation)
    assert unused == []
    return sample


def targets(talk: Conversation, tokenizer: Tokenizer) -> tuple[str, str]:
    """The whole text, and that of the targets."""
    found = encode(talk, tokenizer, find_template("auto", tokenizer))
    kept = [token for token, trained in zip(found.tokens, found.trained, strict=True) if trained]
    return tokenizer.decode(found.tokens), tokenizer.decode(kept)


@pytest.mark.parametrize(
    ("template", "trained"),
    [
        (LLAMA, '{"name": "weather", "parameters": {"city": "Ulm"}}<|eot_id|>the quick fox<|eot_id|>'),
        (
            MISTRAL,
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Ulm"}, "id": "abc123456"}]<|endoftext|> the quick fox<|endoftext|>',
        ),
    ],
)
def test_calls_and_answers_are_targets_and_results_are_not(
    template: str, trained: str, marked: Tokenizer
) -> None:
    own = with_template(marked, template)
    talk = read(ASKED, CALL, RESULT, ANSWER, tools=TOOLS)
    whole, learned = targets(talk, own)
    assert learned == trained
    # As transformers would render it; what a result or a description spells out forges no token.
    messages = [turn.message for turn in talk.turns]
    assert whole == own.render_chat(messages, tools=TOOLS, settings={"date_string": "26 Jul 2024"})
    found = encode(talk, own, find_template("auto", own)).tokens
    assert own.special_ids["<|im_end|>"] not in found


def test_thoughts_of_the_last_answer_are_learned_as_a_thinking_template_writes_them(
    marked: Tokenizer,
) -> None:
    own = with_template(marked, QWEN)
    _, learned = targets(read(ASKED, {**ANSWER, "thinking": "lazy dogs"}), own)
    assert learned == "<think>\nlazy dogs\n</think>\n\nthe quick fox<|im_end|>"


def test_the_prompt_of_the_next_answer_holds_calls_and_results(marked: Tokenizer) -> None:
    own = with_template(marked, LLAMA)
    talk = read(ASKED, CALL, RESULT, ANSWER, tools=TOOLS)
    asked = Conversation(talk.turns[:-1], talk.tools_json)
    prompt = encode_prompt(asked, own, find_template("auto", own))
    assert encode(talk, own, find_template("auto", own)).tokens[: len(prompt)] == prompt


def test_what_a_template_does_not_write_is_refused(marked: Tokenizer) -> None:
    plain = find_template("chatml", marked)
    with pytest.raises(BadRow, match=r"turn 2 calls weather, which the template \(chatml\) does not write"):
        encode(read(ASKED, CALL, RESULT, ANSWER), marked, plain)
    with pytest.raises(
        BadRow, match=r"turn 2 has thoughts \(reasoning_content\), which the template \(chatml\)"
    ):
        encode(read(ASKED, {**ANSWER, "reasoning": "so"}), marked, plain)


def test_arguments_are_an_object_however_they_were_written() -> None:
    as_text, as_object = read(ASKED, CALL), json.loads(json.dumps(CALL))
    as_object["tool_calls"][0]["function"]["arguments"] = {"city": "Ulm"}
    assert as_text == read(ASKED, as_object)
    bare = {**CALL, "tool_calls": [{"name": "weather", "arguments": {"city": "Ulm"}}]}
    assert read(ASKED, bare).turns[1].calls == ["weather"]


def test_pairs_may_differ_in_their_calls() -> None:
    other = json.loads(json.dumps(CALL))
    other["tool_calls"][0]["function"]["arguments"] = {"city": "Paris"}
    pair, _ = read_fields({"chosen": [ASKED, CALL], "rejected": [ASKED, other]}, "preference", paired=True)
    assert [len(one.turns) for one in pair.conversations] == [2, 2]  # type: ignore[union-attr]
    with pytest.raises(BadRow, match="the same"):
        read_fields({"chosen": [ASKED, CALL], "rejected": [ASKED, CALL]}, "preference", paired=True)
