"""What a row says, for every format; and the rows that say nothing that could be trained on."""

from __future__ import annotations

from typing import Any

import pytest

from rush.data.conversations.formats import detect, read_sample
from rush.data.conversations.turns import BadRow, Conversation, Pair, Text, Turn

Q, A = Turn("user", "What jumps?"), Turn("assistant", "The fox.")
USER, ASSISTANT = {"role": "user", "content": "What jumps?"}, {"role": "assistant", "content": "The fox."}
SYSTEM = {"role": "system", "content": "Be brief."}


def read(row: dict[str, Any], format: str = "auto", paired: bool = False) -> Any:
    return read_sample(row, format, paired=paired)


@pytest.mark.parametrize(
    ("row", "format", "sample"),
    [
        ({"messages": [USER, ASSISTANT]}, "chat", Conversation((Q, A))),
        ({"messages": [SYSTEM, USER, ASSISTANT], "prompt": "x", "prompt_id": 3}, "chat",
         Conversation((Turn("system", "Be brief."), Q, A))),
        ({"conversations": [{"from": "human", "value": "What jumps?"}, {"from": "gpt", "value": "The fox."}]}, "chat",
         Conversation((Q, A))),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "jumps?"}]},
                       ASSISTANT]}, "chat", Conversation((Q, A))),
        ({"prompt": "What jumps?", "completion": "The fox."}, "prompt", Conversation((Q, A))),
        ({"question": "What jumps?", "answer": "The fox."}, "prompt", Conversation((Q, A))),
        ({"prompt": [SYSTEM, USER], "completion": [ASSISTANT]}, "prompt", Conversation((Turn("system", "Be brief."), Q, A))),
        ({"instruction": "What jumps?", "input": "", "output": "The fox."}, "instruction", Conversation((Q, A))),
        ({"instruction": "What jumps?", "output": "The fox."}, "instruction", Conversation((Q, A))),
        ({"instruction": "Translate.", "input": "Fuchs", "output": "fox"}, "instruction",
         Conversation((Turn("user", "Translate.\n\nFuchs"), Turn("assistant", "fox")))),
        ({"text": "def fox(): ..."}, "text", Text("def fox(): ...")),
    ],
)  # fmt: skip
def test_each_format_is_detected_and_read(row: dict[str, Any], format: str, sample: Any) -> None:
    assert detect(row, paired=False) == format
    assert read(row) == read(row, format) == sample


PAIR = Pair((Q,), (A,), (Turn("assistant", "A dog."),))
DOG = {"role": "assistant", "content": "A dog."}


@pytest.mark.parametrize(
    ("row", "pair"),
    [
        ({"prompt": "What jumps?", "chosen": "The fox.", "rejected": "A dog."}, PAIR),
        ({"prompt": [USER], "chosen": [ASSISTANT], "rejected": [DOG]}, PAIR),
        ({"prompt": "What jumps?", "chosen": [ASSISTANT], "rejected": [DOG]}, PAIR),
        ({"prompt": [USER], "chosen": "The fox.", "rejected": "A dog."}, PAIR),
        ({"chosen": [USER, ASSISTANT], "rejected": [USER, DOG]}, PAIR),
        # As in UltraFeedback: conversations, beside a prompt that says the same.
        ({"prompt": "What jumps?", "chosen": [USER, ASSISTANT], "rejected": [USER, DOG], "messages": [USER, ASSISTANT],
          "score_chosen": 8.0}, PAIR),
        # The shared beginning may hold answers, and what follows several turns.
        ({"chosen": [USER, ASSISTANT, USER, ASSISTANT], "rejected": [USER, ASSISTANT, USER, DOG]},
         Pair((Q, A, Q), (A,), (Turn("assistant", "A dog."),))),
        ({"chosen": [USER, ASSISTANT, USER, ASSISTANT], "rejected": [USER, DOG]},
         Pair((Q,), (A, Q, A), (Turn("assistant", "A dog."),))),
    ],
)  # fmt: skip
def test_a_pair_is_a_prompt_and_two_ways_to_go_on(row: dict[str, Any], pair: Pair) -> None:
    assert read(row, paired=True) == read(row, "preference", paired=True) == pair


@pytest.mark.parametrize(
    ("row", "reason", "said"),
    [
        ({"messages": [USER]}, "no answer", "the last turn is the user's"),
        ({"messages": [SYSTEM]}, "no answer", "no question and no answer"),
        ({"messages": []}, "no messages", "found an empty list"),
        ({"messages": "hello"}, "no messages", "found str"),
        ({"messages": ["hello"]}, "no messages", r"messages\[0\] must be a message"),
        ({"messages": [{"content": "x"}, ASSISTANT]}, "missing role", r"messages\[0\] has no role; found content"),
        ({"messages": [{"role": "tool", "content": "x"}, ASSISTANT]}, "unknown role", "the role 'tool'. Allowed: system, user"),
        ({"messages": [{"role": 7, "content": "x"}]}, "unknown role", "the role 7"),
        ({"messages": [ASSISTANT, USER]}, "roles out of order", "turn 1 is the assistant's where the user's is due"),
        ({"messages": [USER, USER, ASSISTANT]}, "roles out of order", "turn 2 is the user's where the assistant's is due"),
        ({"messages": [USER, SYSTEM, ASSISTANT]}, "roles out of order", "turn 2 is the system's"),
        ({"messages": [USER, {"role": "assistant", "content": " \n"}]}, "empty answer", "turn 2, the assistant's, is empty"),
        ({"messages": [{"role": "user", "content": ""}, ASSISTANT]}, "empty question", "turn 1, the user's, is empty"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "not a text", "must be a text; found nothing"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "image"}]}]}, "not a text", "found list"),
        ({"messages": [USER, {"role": "assistant", "content": "half \ud83e"}]}, "not a text", "half of a surrogate pair"),
        ({"prompt": "x", "completion": ""}, "empty answer", "the assistant's, is empty"),
        ({"prompt": "x", "completion": 3}, "not a text", "completion must be a text; found int"),
        ({"instruction": "x", "output": ""}, "empty answer", "is empty"),
        ({"text": " "}, "empty text", "the field text is empty"),
        ({"title": "x", "body": "y"}, "unknown fields", "no format has the fields body, title"),
        ({"chosen": "x", "rejected": "y"}, "unknown fields", "chosen and rejected are for objective.kind = 'dpo'"),
    ],
)  # fmt: skip
def test_a_row_without_a_conversation_says_why(row: dict[str, Any], reason: str, said: str) -> None:
    with pytest.raises(BadRow, match=said) as bad:
        read(row)
    assert bad.value.reason == reason


@pytest.mark.parametrize(
    ("row", "reason", "said"),
    [
        ({"prompt": "x", "chosen": "same ", "rejected": " same"}, "chosen equals rejected", "the same answer"),
        ({"chosen": [USER, ASSISTANT], "rejected": [USER, ASSISTANT]}, "chosen equals rejected", "the same conversation"),
        ({"chosen": [USER, ASSISTANT], "rejected": [{"role": "user", "content": "Else?"}, DOG]}, "no common prompt",
         "their first turns differ"),
        ({"chosen": [USER, ASSISTANT, USER, ASSISTANT], "rejected": [USER, ASSISTANT, {"role": "user", "content": "?"}, DOG]},
         "no common prompt", "they part after 2 turns, at a question"),
        ({"chosen": "x", "rejected": "y"}, "no common prompt", "there is no field prompt"),
        ({"prompt": "x", "chosen": "y", "rejected": ""}, "empty answer", "is empty"),
        ({"prompt": "x", "chosen": "y", "rejected": None}, "unknown fields", r"found chosen, prompt, rejected \(null\)"),
        ({"messages": [USER, ASSISTANT]}, "unknown fields", "need the fields chosen and rejected; found messages"),
        ({"chosen": [USER, ASSISTANT], "rejected": [USER]}, "no answer", "the last turn is the user's"),
    ],
)  # fmt: skip
def test_a_row_without_a_preference_says_why(row: dict[str, Any], reason: str, said: str) -> None:
    with pytest.raises(BadRow, match=said) as bad:
        read(row, paired=True)
    assert bad.value.reason == reason


def test_a_named_format_says_which_field_it_needs() -> None:
    with pytest.raises(
        BadRow, match="the format 'chat' needs the field messages or conversations; found text"
    ):
        read({"text": "x"}, "chat")


def test_one_question_is_one_group_whatever_the_answer() -> None:
    """So that a held-out question is never trained on with another answer, nor in a pair."""
    other = Conversation((Q, Turn("assistant", "A dog.")))
    assert Conversation((Q, A)).group == other.group == PAIR.group
    assert Conversation((Turn("user", "Else?"), A)).group != other.group
