"""Formats of fine-tuning data: one function per format, and detection by the fields that are not null.

chat         messages: [{role, content}, …], or ShareGPT's conversations: [{from, value}, …]
prompt       prompt and completion (also question/answer, response)
instruction  instruction, input (may be empty or absent), output
text         text (or the field that data.text_field names)
preference   chosen and rejected, as texts beside a prompt, or as conversations that share a beginning

In all formats but text, the field system (or system_prompt) is a system turn at the start. A turn may have a weight: 0 is not
trained, 1 is trained. The field tools (a list of JSON schemas) goes to the chat template, and so do the tool_calls of an answer,
the results of tools (role tool) and the thoughts of an answer (reasoning_content). Other fields are unused, and listed by
`read_fields`. A null counts as missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rush.data.conversations.turns import (
    REASONING,
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
SYSTEM_FIELDS = ("system", "system_prompt")
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Other names of the roles in published data.
_ALIASES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
    "function": "tool", "observation": "tool", "ipython": "tool",
}  # fmt: skip
FORMATS = ("chat", "prompt", "instruction", "text", "preference")


class _Fields:
    """The fields of a row or a message that are not null, and which of them were used."""

    def __init__(self, row: Values) -> None:
        self._row = row
        self.values = {name: value for name, value in row.items() if value is not None}
        self.used: set[str] = set()
        self.deeper: set[str] = set()
        """Unused fields of messages, as in messages[].name."""

    def first(self, names: tuple[str, ...]) -> str | None:
        return next((name for name in names if name in self.values), None)

    def has(self, *names: str) -> bool:
        return all(name in self.values for name in names)

    def needed(self, names: tuple[str, ...], format: str) -> str:
        found = self.first(names)
        if found is None:
            raise BadRow(
                "missing field",
                f"the format {format!r} needs the field {' or '.join(names)}; found {self.names}",
            )
        return found

    def take(self, name: str | None) -> Any:
        """The value of a field, marked as used; None if it is missing."""
        if name is None or name not in self.values:
            return None
        self.used.add(name)
        return self.values[name]

    @property
    def names(self) -> str:
        """All field names, with (null) where a field is null."""
        names = (str(name) if name in self.values else f"{name} (null)" for name in self._row)
        return ", ".join(sorted(names)) or "none"

    @property
    def unused(self) -> list[str]:
        return sorted({str(name) for name in self.values if name not in self.used} | self.deeper)


def read_fields(
    row: Values, format: str, *, paired: bool, text_field: str = "text"
) -> tuple[Sample, list[str]]:
    """The sample of a row, and its unused fields."""
    name = detect(row, paired=paired, text_field=text_field) if format == "auto" else format
    fields = _Fields(row)
    sample = _text(fields, text_field) if name == "text" else _READERS[name](fields)
    return sample, fields.unused


def detect(row: Values, *, paired: bool, text_field: str = "text") -> str:
    """The format of a row, by its fields that are not null."""
    fields = _Fields(row)
    if paired:
        if fields.has("chosen", "rejected"):
            return "preference"
        raise BadRow(
            "unknown fields",
            f"preferences need the fields chosen and rejected; found {fields.names}. For single answers "
            "set objective.kind to 'sft'",
        )
    if fields.first(CHAT_FIELDS):
        return "chat"
    if fields.has("instruction") and fields.first(OUTPUT_FIELDS):
        return "instruction"
    if fields.first(QUESTION_FIELDS) and fields.first(ANSWER_FIELDS):
        return "prompt"
    if fields.first((text_field, "text")):
        return "text"
    hint = "; chosen and rejected are for objective.kind = 'dpo'" if fields.has("chosen", "rejected") else ""
    raise BadRow(
        "unknown fields",
        f"no format has the fields {fields.names}{hint}. Allowed: messages; prompt and completion; instruction and "
        f"output; {text_field}",
    )


def _chat(fields: _Fields) -> Conversation:
    field = fields.needed(CHAT_FIELDS, "chat")
    return _conversation(fields, _turns(fields, field))


def _prompt(fields: _Fields) -> Conversation:
    prompt, answer = fields.needed(QUESTION_FIELDS, "prompt"), fields.needed(ANSWER_FIELDS, "prompt")
    if isinstance(fields.values[prompt], list) and isinstance(fields.values[answer], list):
        return _conversation(fields, _turns(fields, prompt) + _turns(fields, answer))
    asked, said = _string(fields.take(prompt), prompt), _string(fields.take(answer), answer)
    return _conversation(fields, (Turn("user", asked), Turn("assistant", said)))


def _instruction(fields: _Fields) -> Conversation:
    instruction = fields.needed(("instruction",), "instruction")
    output = fields.needed(OUTPUT_FIELDS, "instruction")
    given = fields.first(INPUT_FIELDS)
    question = _string(fields.take(instruction), instruction)
    if given and (more := _string(fields.take(given), given)).strip():
        question = f"{question}\n\n{more}"
    answer = Turn("assistant", _string(fields.take(output), output))
    return _conversation(fields, (Turn("user", question), answer))


def _conversation(fields: _Fields, turns: tuple[Turn, ...]) -> Conversation:
    turns = _with_system(fields, turns)
    check_order(turns)
    check_contents(turns)
    return Conversation(turns, _tools(fields))


def _tools(fields: _Fields) -> str | None:
    """The tools of a row, as JSON; None where there are none. Some datasets write them as a JSON text."""
    if fields.take("functions"):
        raise BadRow("tools", "the field functions is not supported; write the functions as tools")
    tools = fields.take("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools or "[]")
        except (ValueError, RecursionError) as error:
            raise BadRow("tools", "the field tools is a text that is no JSON") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise BadRow("tools", f"tools must be a list of JSON schemas; found {type(tools).__name__}")
    return _json(tools, "tools")


def _with_system(fields: _Fields, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """The turns, after the system turn of a system field if there is one."""
    field = fields.first(SYSTEM_FIELDS)
    if field is None:
        return turns
    system = _string(fields.take(field), field)
    if not system.strip():
        return turns
    if not turns or turns[0].role != "system":
        return (Turn("system", system), *turns)
    if turns[0].content.strip() != system.strip():
        raise BadRow(
            "two system turns",
            f"the field {field} and the system turn of the conversation say different things; keep one of them",
        )
    return turns


def _text(fields: _Fields, field: str) -> Text:
    # The content of a text file is the field text.
    field = fields.needed((field, "text"), "text")
    text = _string(fields.take(field), field)
    if not text.strip():
        raise BadRow("empty text", f"the field {field} is empty")
    return Text(text)


def _preference(fields: _Fields) -> Pair:
    answers = [fields.values[fields.needed((name,), "preference")] for name in ("chosen", "rejected")]
    if all(isinstance(answer, str) for answer in answers):
        pair = _pair_of_texts(fields)
    else:
        pair = _pair_of_conversations(fields, _turns(fields, "chosen"), _turns(fields, "rejected"))
    pair = replace(pair, prompt=_with_system(fields, pair.prompt), tools_json=_tools(fields))
    if _stripped(pair.chosen) == _stripped(pair.rejected):
        raise BadRow("chosen equals rejected", "chosen and rejected are the same answer")
    for conversation in pair.conversations:
        check_order(conversation.turns)
        check_contents(conversation.turns)
    if any(turn.trained is False for turn in pair.chosen + pair.rejected):
        raise BadRow(
            "weight in a preference",
            "an answer that is compared has the weight 0; preferences train both answers",
        )
    return pair


def _pair_of_texts(fields: _Fields) -> Pair:
    field = fields.first(QUESTION_FIELDS)
    if field is None:
        raise BadRow(
            "no common prompt",
            f"chosen and rejected are texts and there is no field prompt; found {fields.names}. Give the prompt, or "
            "two conversations that share a beginning",
        )
    chosen, rejected = (
        Turn("assistant", _string(fields.take(name), name)) for name in ("chosen", "rejected")
    )
    return Pair(_prompt_turns(fields, field), (chosen,), (rejected,))


def _pair_of_conversations(fields: _Fields, chosen: tuple[Turn, ...], rejected: tuple[Turn, ...]) -> Pair:
    starts_anew = any(turns[:1] and turns[0].role != "assistant" for turns in (chosen, rejected))
    if not starts_anew and fields.has("prompt"):
        # Only the answers are given; the prompt is another field.
        return Pair(_prompt_turns(fields, "prompt"), chosen, rejected)
    ours, theirs = (
        [(turn.role, turn.content, turn.more_json) for turn in turns] for turns in (chosen, rejected)
    )
    if ours == theirs:
        raise BadRow("chosen equals rejected", "chosen and rejected are the same conversation")
    shared = 0
    while shared < min(len(ours), len(theirs)) and ours[shared] == theirs[shared]:
        shared += 1
    # Equal answers are part of the prompt, whose last turn is the question or the result of a tool.
    if not shared or chosen[shared - 1].role not in ("user", "tool"):
        raise BadRow(
            "no common prompt",
            "chosen and rejected do not answer the same question: "
            + (f"they part after {shared} turns, at a question" if shared else "their first turns differ"),
        )
    return Pair(chosen[:shared], chosen[shared:], rejected[shared:])


def _prompt_turns(fields: _Fields, field: str) -> tuple[Turn, ...]:
    """A prompt: a list of messages, or the text of a user turn."""
    if isinstance(fields.values[field], list):
        return _turns(fields, field)
    return (Turn("user", _string(fields.take(field), field)),)


def _turns(fields: _Fields, field: str) -> tuple[Turn, ...]:
    value = fields.take(field)
    if not isinstance(value, list) or not value:
        found = "an empty list" if value == [] else type(value).__name__
        raise BadRow("no messages", f"{field} must be a list of messages; found {found}")
    turns = []
    for place, message in enumerate(value):
        where = f"{field}[{place}]"
        if not isinstance(message, Mapping):
            raise BadRow(
                "no messages",
                f"{where} must be a message with role and content; found {type(message).__name__}",
            )
        inner = _Fields(message)
        turns.append(_turn(inner, where))
        fields.deeper |= {f"{field}[].{name}" for name in inner.unused}
    return tuple(turns)


def _turn(message: _Fields, where: str) -> Turn:
    role = message.take(message.first(("role", "from")))
    if role is None:
        raise BadRow(
            "missing role", f"{where} has no role; found {message.names}. Allowed: {', '.join(ROLES)}"
        )
    known = _ALIASES.get(role, role) if isinstance(role, str) else None
    if known not in ROLES:
        raise BadRow("unknown role", f"{where} has the role {role!r}. Allowed: {', '.join(ROLES)}")
    more = _more(message, str(known), where)
    content = message.take(message.first(("content", "value")))
    if content is None and "tool_calls" in more:
        content = ""
    if isinstance(content, list) and all(
        isinstance(part, Mapping) and part.get("type") == "text" for part in content
    ):
        content = "".join(_string(part.get("text"), f"{where}.content") for part in content)
    trained = _trained(message.take("weight"), where)
    return Turn(
        known,
        _string(content, f"{where}.content"),
        trained,
        _json(more, f"{where}'s fields") if more else None,
    )


def _more(message: _Fields, role: str, where: str) -> dict[str, Any]:
    """What a template may read besides role and content."""
    if message.take("function_call"):
        raise BadRow("tool calls", f"{where} has function_call; write the call as tool_calls")
    more: dict[str, Any] = {}
    calls = message.take("tool_calls")
    if calls:
        if role != "assistant":
            raise BadRow("tool calls", f"{where} has tool_calls, but the {role} calls no tools")
        more["tool_calls"] = _calls(calls, where)
    if role == "tool":
        for name in ("name", "tool_call_id"):
            if (value := message.take(name)) is not None:
                more[name] = _string(value, f"{where}.{name}")
    field = message.first(REASONING_FIELDS) if role == "assistant" else None
    if field is not None and (thoughts := _string(message.take(field), f"{where}.{field}")):
        more[REASONING] = thoughts
    return more


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls as templates want them: arguments as an object, also where a dataset wrote them as a JSON text."""
    if isinstance(calls, str):
        calls = _parsed(calls, f"{where} has tool_calls that are")
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise BadRow("tool calls", f"{where} has tool_calls that are no list of calls")
    found = []
    for call in calls:
        function = call.get("function", call)
        if (
            not isinstance(function, Mapping)
            or not isinstance(function.get("name"), str)
            or not function["name"]
        ):
            raise BadRow("tool calls", f"{where} has tool_calls without the name of a function")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _parsed(arguments or "{}", f"{where} has tool_calls whose arguments are")
        if not isinstance(arguments, Mapping):
            raise BadRow("tool calls", f"{where} has tool_calls whose arguments are no JSON object")
        whole = {**function, "arguments": arguments}
        found.append({**call, "function": whole} if "function" in call else whole)
    return found


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRow("tool calls", f"{what} a text that is no JSON") from error


def _json(value: Any, what: str) -> str:
    """A value as JSON that can be encoded."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow("tools", f"{what} cannot be written as JSON ({error})") from error
    return text


def _trained(weight: Any, where: str) -> bool | None:
    """Whether a turn is trained, by its weight; None without one."""
    if weight is None:
        return None
    if isinstance(weight, bool) or not isinstance(weight, int | float) or weight not in (0, 1):
        raise BadRow(
            "unknown weight", f"{where} has the weight {weight!r}. Allowed: 0 (not trained) and 1 (trained)"
        )
    return bool(weight)


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


def _stripped(turns: tuple[Turn, ...]) -> list[tuple[str, str, str | None]]:
    return [(turn.role, turn.content.strip(), turn.more_json) for turn in turns]


_READERS: dict[str, Callable[[_Fields], Sample]] = {
    "chat": _chat,
    "prompt": _prompt,
    "instruction": _instruction,
    "preference": _preference,
}
