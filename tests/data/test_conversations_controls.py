"""What a user writes forges no control token; what a row holds is written or refused."""

from __future__ import annotations

import json

import pytest
import tokenizers

from rush.data import Tokenizer
from rush.data.conversations import Conversation, Turn, encode, find_template
from rush.data.conversations.encode import controls_in
from rush.data.conversations.filtering import write_row
from rush.data.conversations.formats import read_fields
from rush.data.conversations.preparation import DocumentPreparation
from rush.data.conversations.rows import Row
from rush.data.conversations.turns import BadRow
from rush.data.holdout import share_that_holds, split_of

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "It says <|im_end|>"}}]
WITH_TOOLS = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}
{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"""


@pytest.fixture(scope="module")
def thinking(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer with added tokens: one special, one that marks a thought and is not special, one that is a word."""
    core = tokenizers.Tokenizer.from_str(tokenizer.json_text)
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    core.add_tokens(["<think>", "</think>", "fox trot"])
    return Tokenizer(core.to_str(), tokenizer.eos_token)


def ids_of(talk: Conversation, tokenizer: Tokenizer) -> list[int]:
    return encode(talk, tokenizer, find_template("chatml", tokenizer)).tokens


def test_a_question_forges_no_thought_and_an_answer_has_one(thinking: Tokenizer) -> None:
    think = thinking.control_ids["<think>"]
    said = "<think>why</think> so"
    asked = ids_of(Conversation((Turn("user", said), Turn("assistant", "yes"))), thinking)
    assert think not in asked
    assert said in thinking.decode(asked)
    answered = ids_of(Conversation((Turn("user", "q"), Turn("assistant", said))), thinking)
    assert answered.count(think) == 1
    # An answer that also forges a special token keeps its thought, and ends only once.
    both = ids_of(Conversation((Turn("user", "q"), Turn("assistant", f"{said}<|im_end|>"))), thinking)
    assert both.count(think) == 1
    assert both.count(thinking.special_ids["<|im_end|>"]) == 2  # of the two turns


def test_words_that_were_added_stay_tokens_in_a_question(thinking: Tokenizer) -> None:
    (word,) = thinking.encode("fox trot")
    assert "fox trot" not in thinking.control_ids
    assert word in ids_of(
        Conversation((Turn("user", "a fox trot <think>"), Turn("assistant", "b"))), thinking
    )


def test_a_normalizer_cannot_make_a_control_token_of_other_letters(tokenizer: Tokenizer) -> None:
    core = tokenizers.Tokenizer.from_str(tokenizer.json_text)
    core.normalizer = tokenizers.normalizers.Lowercase()
    core.add_tokens([tokenizers.AddedToken("<think>", normalized=True)])
    lower = Tokenizer(core.to_str(), tokenizer.eos_token)
    think = lower.control_ids["<think>"]
    assert think in lower.encode("<THINK>")
    assert think not in ids_of(Conversation((Turn("user", "<THINK>"), Turn("assistant", "b"))), lower)


def test_the_rows_that_spell_out_a_control_token_are_counted(thinking: Tokenizer) -> None:
    turns = (Turn("user", "<think> <|im_end|>"), Turn("assistant", "<think>"))
    assert controls_in(turns, thinking) == {
        "<think> in user turns (as text)",
        "<|im_end|> in user turns (as text)",
        "<think> in answers (the token)",
    }


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_tools_are_written_by_a_template_that_takes_them(thinking: Tokenizer, tools: object) -> None:
    row = {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        "tools": tools,
    }
    talk, unused = read_fields(row, "chat", paired=False)
    assert unused == []
    own = Tokenizer(thinking.json_text, thinking.eos_token, chat_template=WITH_TOOLS)
    tokens = encode(talk, own, find_template("auto", own)).tokens  # type: ignore[arg-type]
    assert json.dumps(TOOLS) in own.decode(tokens)
    assert own.special_ids["<|im_end|>"] not in tokens  # a description forges nothing


def test_tools_are_refused_by_a_template_that_does_not_write_them(thinking: Tokenizer) -> None:
    talk = Conversation((Turn("user", "q"), Turn("assistant", "a")), json.dumps(TOOLS))
    with pytest.raises(BadRow, match=r"has tools, which the template \(chatml\) does not write"):
        encode(talk, thinking, find_template("chatml", thinking))
    reads = "{% if tools %}{% endif %}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    own = Tokenizer(thinking.json_text, thinking.eos_token, chat_template=reads)
    with pytest.raises(BadRow, match="does not write"):
        encode(talk, own, find_template("auto", own))


@pytest.mark.parametrize("tools", ["{", 7, [1], "[1]"])
def test_tools_that_are_none_are_refused(tools: object) -> None:
    row = {
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
        "tools": tools,
    }
    with pytest.raises(BadRow, match="tools"):
        read_fields(row, "chat", paired=False)


def test_a_row_of_megabytes_is_refused_by_its_length(thinking: Tokenizer) -> None:
    assert thinking.fewest_tokens(5_000_000) <= len(thinking.encode("fox " * 1000)) * 1250
    options = DocumentPreparation(vocab_size=1000, sequence=64, too_long="error")
    values = {"prompt": "q", "completion": "fox " * 10_000_000}
    with pytest.raises(Exception, match=r"more than [\d,]+ tokens, longer than batch.sequence = 64"):
        write_row(Row("a.jsonl:1", values), options, thinking, find_template("chatml", thinking), _writers())


def _writers() -> dict[str, object]:
    from pathlib import Path

    from rush.data.conversations.store import DocumentWriter

    return {split: DocumentWriter(Path(), split, "0", 1000) for split in ("train", "validation")}


def test_a_share_that_holds_no_document_holds_one() -> None:
    texts = [f"document {n}" for n in range(6)]
    share = share_that_holds(texts, 0, 1e-9)
    assert [split_of(text, 0, share) for text in texts].count("validation") == 1
    assert share_that_holds(reversed(texts), 0, 1e-9) == share
    assert share_that_holds(texts, 0, 0.9) == 0.9
    assert share_that_holds(texts, 0, 0.0) == 0.0
    assert share_that_holds(["the same"] * 5, 0, 1e-9) == 1e-9  # one must be left to train on
