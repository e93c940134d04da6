"""What a row says, for every format; and the rows that say nothing that could be trained on."""

from __future__ import annotations

from typing import Any

import pytest

from rush.data.conversations.formats import detect, read_fields
from rush.data.conversations.turns import BadRow, Conversation, Pair, Text, Turn

Q, A = Turn("user", "What jumps?"), Turn("assistant", "The fox.")
USER, ASSISTANT = {"role": "user", "content": "What jumps?"}, {"role": "assistant", "content": "The fox."}
SYSTEM = {"role": "system", "content": "Be brief."}


def read(row: dict[str, Any], format: str = "auto", paired: bool = False) -> Any:
    return read_fields(row, format, paired=paired)[0]


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
def test_a_pair_is_a_prompt_and_two_answers(row: dict[str, Any], pair: Pair) -> None:
    assert read(row, paired=True) == read(row, "preference", paired=True) == pair


@pytest.mark.parametrize(
    ("row", "reason", "said"),
    [
        ({"messages": [USER]}, "no answer", "the last turn is the user's"),
        *(({"messages": [USER, {**ASSISTANT, "tool_calls": calls}]}, "tool calls", rf"messages\[1\] has tool_calls {said}")
          for calls, said in ((7, "that are no list"), ([1], "that are no list"), ([{}], "without the name"), ("[", "that are a text"),
                              ([{"function": {"name": 3}}], "without the name"),
                              ([{"name": "f", "arguments": "{"}], "whose arguments are a text"),
                              ([{"name": "f", "arguments": [1]}], "whose arguments are no JSON object"))),
        ({"messages": [{**USER, "tool_calls": [{"name": "f"}]}, ASSISTANT]}, "tool calls", "the user calls no tools"),
        ({"messages": [USER, {**ASSISTANT, "tool_calls": [{"name": "f"}]}, USER, ASSISTANT]}, "roles out of order",
         "turn 3 is the user's where the tool's is due"),
        ({"messages": [USER, ASSISTANT, {"role": "tool", "content": "x"}, ASSISTANT]}, "roles out of order", "turn 3 is the tool's"),
        ({"messages": [USER, {**ASSISTANT, "tool_calls": [{"name": "f"}]}, {"role": "tool", "content": "x"}]}, "no answer",
         "the last turn is the tool's"),
        ({"messages": [USER, {**ASSISTANT, "reasoning_content": 7}]}, "not a text", "reasoning_content must be a text"),
        ({"messages": [USER, {**ASSISTANT, "function_call": {"name": "f"}}]}, "tool calls", "has function_call"),
        *(({"messages": [USER, {**ASSISTANT, "weight": weight}]}, "unknown weight", r"messages\[1\] has the weight .* Allowed: 0")
          for weight in (0.5, -1, 2, "0", True, [], float("nan"))),
        ({"messages": [SYSTEM, USER, ASSISTANT], "system": "Be long."}, "two system turns", "say different things"),
        ({"messages": [USER, ASSISTANT], "system": ["Be brief."]}, "not a text", "system must be a text; found list"),
        ({"messages": None, "prompt": "x"}, "unknown fields", r"no format has the fields messages \(null\), prompt"),
        ({"messages": [SYSTEM]}, "no answer", "no question and no answer"),
        ({"messages": []}, "no messages", "found an empty list"),
        ({"messages": "hello"}, "no messages", "found str"),
        ({"messages": ["hello"]}, "no messages", r"messages\[0\] must be a message"),
        ({"messages": [{"content": "x"}, ASSISTANT]}, "missing role", r"messages\[0\] has no role; found content"),
        ({"messages": [{"role": "critic", "content": "x"}, ASSISTANT]}, "unknown role", "the role 'critic'. Allowed: system, user"),
        ({"messages": [{"role": "tool", "content": "x"}, ASSISTANT]}, "roles out of order", "turn 1 is the tool's"),
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
        ({"prompt": "x", "chosen": "half \ud800", "rejected": "y"}, "not a text", "chosen holds half of a surrogate pair"),
        ({"prompt": "x", "chosen": "y", "rejected": "half \ud800"}, "not a text", "rejected holds half of a surrogate pair"),
        ({"chosen": [USER, ASSISTANT], "rejected": [USER, {**DOG, "weight": 0}]}, "weight in a preference", "the weight 0"),
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


FRONT = Turn("system", "Be brief.")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ASSISTANT], "system": "Be brief."},
        {"messages": [SYSTEM, USER, ASSISTANT], "system": "Be brief.\n"},
        {"conversations": [{"from": "human", "value": "What jumps?"}, {"from": "gpt", "value": "The fox."}], "system": "Be brief."},
        {"prompt": "What jumps?", "completion": "The fox.", "system": "Be brief."},
        {"question": "What jumps?", "response": "The fox.", "system_prompt": "Be brief."},
        {"prompt": [USER], "completion": [ASSISTANT], "system": "Be brief."},
        {"instruction": "What jumps?", "output": "The fox.", "system": "Be brief."},
    ],
)  # fmt: skip
def test_a_system_column_is_a_system_turn_at_the_front(row: dict[str, Any]) -> None:
    assert read(row) == Conversation((FRONT, Q, A))


@pytest.mark.parametrize("nothing", [None, "", " "])
def test_a_system_column_that_says_nothing_is_no_turn(nothing: str | None) -> None:
    assert read({"prompt": "What jumps?", "completion": "The fox.", "system": nothing}) == Conversation(
        (Q, A)
    )


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "What jumps?", "chosen": "The fox.", "rejected": "A dog."},
        {"prompt": [USER], "chosen": [ASSISTANT], "rejected": [DOG]},
        {"chosen": [USER, ASSISTANT], "rejected": [USER, DOG]},
        {"chosen": [SYSTEM, USER, ASSISTANT], "rejected": [SYSTEM, USER, DOG]},
    ],
)
def test_a_system_column_is_the_first_turn_of_a_pairs_prompt(row: dict[str, Any]) -> None:
    assert read({**row, "system": "Be brief."}, paired=True) == Pair((FRONT, Q), PAIR.chosen, PAIR.rejected)


def test_weights_say_which_turns_are_trained() -> None:
    for weight, trained in ((0, False), (1, True), (0.0, False), (1.0, True), (None, None)):
        found = read({"messages": [USER, {**ASSISTANT, "weight": weight}]})
        assert found.turns == (Q, Turn("assistant", "The fox.", trained))
    first, second = {**ASSISTANT, "weight": 1}, {**ASSISTANT, "weight": 0}
    pair = read(
        {"chosen": [USER, first, USER, ASSISTANT], "rejected": [USER, second, USER, DOG]}, paired=True
    )
    assert len(pair.prompt) == 3, "a weight in the shared beginning does not part the two"


@pytest.mark.parametrize("empty", ["messages", "conversations", "instruction", "question"])
def test_a_field_that_is_null_is_absent(empty: str) -> None:
    row = {empty: None, "output": None, "prompt": "What jumps?", "completion": "The fox.", "text": None}
    assert detect(row, paired=False) == "prompt"
    assert read(row) == Conversation((Q, A))
    both = {"role": None, "content": None, "from": "human", "value": "What jumps?", "tool_calls": None}
    assert read({"messages": [both, {**ASSISTANT, "from": None, "tool_calls": []}]}) == Conversation((Q, A))


@pytest.mark.parametrize(
    ("row", "paired", "unused"),
    [
        ({"prompt": "x", "completion": "y", "system": "z"}, False, []),
        ({"prompt": "x", "completion": "y", "id": 7, "score": 0.5, "source": None}, False, ["id", "score"]),
        ({"messages": [{**USER, "name": "Ann", "weight": 0}, ASSISTANT], "prompt": "x"}, False, ["messages[].name", "prompt"]),
        ({"text": "x", "system": "y"}, False, ["system"]),
        ({"instruction": "x", "input": "", "output": "y"}, False, []),
        ({"prompt": "x", "chosen": "y", "rejected": "z", "messages": []}, True, ["messages"]),
        ({"prompt": "x", "chosen": [USER, ASSISTANT], "rejected": [USER, DOG]}, True, ["prompt"]),
        ({"prompt": "x", "chosen": [ASSISTANT], "rejected": [DOG]}, True, []),
    ],
)  # fmt: skip
def test_the_fields_that_were_not_used_are_named(
    row: dict[str, Any], paired: bool, unused: list[str]
) -> None:
    assert read_fields(row, "auto", paired=paired)[1] == unused
