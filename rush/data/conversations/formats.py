"""A row's fields to what they say. One function a format, and the detection by field names.

chat         messages: [{role, content}, …], or ShareGPT's conversations: [{from, value}, …]
prompt       prompt and completion (also question/answer, response)
instruction  instruction, input (may be empty or absent), output
text         text (or the field that data.text_field names)
preference   chosen and rejected, as texts beside a prompt, or as conversations that share a beginning
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rush.data.conversations.turns import (
    ROLES,
    BadRow,
    Conversation,
    Pair,
    Sample,
    Text,
    Turn,
    check_contents,
    check_order,
)

Values = Mapping[str, Any]

CHAT_FIELDS = ("messages", "conversations")
QUESTION_FIELDS = ("prompt", "question")
ANSWER_FIELDS = ("completion", "response", "answer")
INPUT_FIELDS = ("input", "context")
OUTPUT_FIELDS = ("output", "response")
# What published data calls the three roles.
_ALIASES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
}  # fmt: skip
FORMATS = ("chat", "prompt", "instruction", "text", "preference")


def read_sample(row: Values, format: str, *, paired: bool, text_field: str = "text") -> Sample:
    """The sample in a row, checked; BadRow where it holds none."""
    name = detect(row, paired=paired, text_field=text_field) if format == "auto" else format
    if name == "text":
        return _text(row, text_field)
    return _READERS[name](row)


def detect(row: Values, *, paired: bool, text_field: str = "text") -> str:
    """The format whose fields a row has."""
    if paired:
        if "chosen" in row and "rejected" in row:
            return "preference"
        raise BadRow(
            "unknown fields",
            f"preferences need the fields chosen and rejected; found {_names(row)}. For answers without a rival "
            "set objective.kind to 'sft'",
        )
    if _first(row, CHAT_FIELDS):
        return "chat"
    if "instruction" in row and _first(row, OUTPUT_FIELDS):
        return "instruction"
    if _first(row, QUESTION_FIELDS) and _first(row, ANSWER_FIELDS):
        return "prompt"
    if _first(row, (text_field, "text")):
        return "text"
    hint = (
        "; chosen and rejected are for objective.kind = 'dpo'"
        if "chosen" in row and "rejected" in row
        else ""
    )
    raise BadRow(
        "unknown fields",
        f"no format has the fields {_names(row)}{hint}. Allowed: messages; prompt and completion; instruction and "
        f"output; {text_field}",
    )


def _chat(row: Values) -> Conversation:
    field = _needed(row, CHAT_FIELDS, "chat")
    turns = _turns(row[field], field)
    check_order(turns)
    check_contents(turns)
    return Conversation(turns)


def _prompt(row: Values) -> Conversation:
    prompt, answer = _needed(row, QUESTION_FIELDS, "prompt"), _needed(row, ANSWER_FIELDS, "prompt")
    if isinstance(row[prompt], list) and isinstance(row[answer], list):
        turns = _turns(row[prompt], prompt) + _turns(row[answer], answer)
    else:
        turns = (Turn("user", _string(row[prompt], prompt)), Turn("assistant", _string(row[answer], answer)))
    check_order(turns)
    check_contents(turns)
    return Conversation(turns)


def _instruction(row: Values) -> Conversation:
    instruction = _needed(row, ("instruction",), "instruction")
    output = _needed(row, OUTPUT_FIELDS, "instruction")
    given = _first(row, INPUT_FIELDS)
    question = _string(row[instruction], instruction)
    if given and row[given] is not None and (more := _string(row[given], given)).strip():
        question = f"{question}\n\n{more}"
    turns = (Turn("user", question), Turn("assistant", _string(row[output], output)))
    check_contents(turns)
    return Conversation(turns)


def _text(row: Values, field: str) -> Text:
    field = _needed(row, (field, "text"), "text")  # a text file has no fields: what it holds is called text
    text = _string(row[field], field)
    if not text.strip():
        raise BadRow("empty text", f"the field {field} is empty")
    return Text(text)


def _preference(row: Values) -> Pair:
    chosen, rejected = (row[_needed(row, (name,), "preference")] for name in ("chosen", "rejected"))
    if isinstance(chosen, str) and isinstance(rejected, str):
        pair = _texts_pair(row, chosen, rejected)
    else:
        pair = _conversations_pair(row, _turns(chosen, "chosen"), _turns(rejected, "rejected"))
    if _stripped(pair.chosen) == _stripped(pair.rejected):
        raise BadRow("chosen equals rejected", "chosen and rejected are the same answer")
    for conversation in pair.conversations:
        check_order(conversation.turns)
        check_contents(conversation.turns)
    return pair


def _texts_pair(row: Values, chosen: str, rejected: str) -> Pair:
    if not _first(row, QUESTION_FIELDS):
        raise BadRow(
            "no common prompt",
            f"chosen and rejected are texts and there is no field prompt; found {_names(row)}. Give the prompt, or "
            "two conversations that share a beginning",
        )
    field = _needed(row, QUESTION_FIELDS, "preference")
    value = row[field]
    prompt = _turns(value, field) if isinstance(value, list) else (Turn("user", _string(value, field)),)
    return Pair(prompt, (Turn("assistant", chosen),), (Turn("assistant", rejected),))


def _conversations_pair(row: Values, chosen: tuple[Turn, ...], rejected: tuple[Turn, ...]) -> Pair:
    value = row.get("prompt")
    starts_anew = any(turns[:1] and turns[0].role != "assistant" for turns in (chosen, rejected))
    if not starts_anew and value is not None:
        # Only the answers are given: the prompt stands beside them.
        prompt = (
            _turns(value, "prompt") if isinstance(value, list) else (Turn("user", _string(value, "prompt")),)
        )
        return Pair(prompt, chosen, rejected)
    if chosen == rejected:
        raise BadRow("chosen equals rejected", "chosen and rejected are the same conversation")
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    # Answers that are alike are part of the prompt; the question to answer is its last turn.
    if not shared or chosen[shared - 1].role != "user":
        raise BadRow(
            "no common prompt",
            "chosen and rejected do not answer the same question: "
            + (f"they part after {shared} turns, at a question" if shared else "their first turns differ"),
        )
    return Pair(chosen[:shared], chosen[shared:], rejected[shared:])


def _turns(value: Any, field: str) -> tuple[Turn, ...]:
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else type(value).__name__
        raise BadRow("no messages", f"{field} must be a list of messages; found {found}")
    return tuple(_turn(message, f"{field}[{place}]") for place, message in enumerate(value))


def _turn(message: Any, where: str) -> Turn:
    if not isinstance(message, Mapping):
        raise BadRow(
            "no messages", f"{where} must be a message with role and content; found {type(message).__name__}"
        )
    role = message.get("role", message.get("from"))
    if role is None:
        raise BadRow(
            "missing role", f"{where} has no role; found {_names(message)}. Allowed: {', '.join(ROLES)}"
        )
    known = _ALIASES.get(role, role) if isinstance(role, str) else None
    if known not in ROLES:
        raise BadRow("unknown role", f"{where} has the role {role!r}. Allowed: {', '.join(ROLES)}")
    content = message.get("content", message.get("value"))
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        content = "".join(_string(part.get("text"), f"{where}.content") for part in content)
    return Turn(known, _string(content, f"{where}.content"))


def _string(value: Any, field: str) -> str:
    if not isinstance(value, str):
        found = "nothing" if value is None else type(value).__name__
        raise BadRow("not a text", f"{field} must be a text; found {found}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRow(
            "not a text",
            f"{field} holds half of a surrogate pair at character {error.start}, which no encoding can write",
        ) from error
    return value


def _stripped(turns: tuple[Turn, ...]) -> list[tuple[str, str]]:
    return [(turn.role, turn.content.strip()) for turn in turns]


def _first(row: Values, fields: tuple[str, ...]) -> str | None:
    return next((field for field in fields if field in row), None)


def _needed(row: Values, fields: tuple[str, ...], format: str) -> str:
    found = _first(row, fields)
    if found is None:
        raise BadRow(
            "missing field",
            f"the format {format!r} needs the field {' or '.join(fields)}; found {_names(row)}",
        )
    return found


def _names(row: Values) -> str:
    return ", ".join(sorted(map(str, row))) or "none"


_READERS: dict[str, Callable[[Values], Sample]] = {
    "chat": _chat,
    "prompt": _prompt,
    "instruction": _instruction,
    "preference": _preference,
}
