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

from rush.data.conversations.messages import Fields, Values, as_json, read_text, read_turns
from rush.data.conversations.turns import (
    BadRow,
    Conversation,
    Pair,
    Sample,
    Text,
    Turn,
    check_contents,
    check_order,
)

CHAT_FIELDS = ("messages", "conversations")
QUESTION_FIELDS = ("prompt", "question")
ANSWER_FIELDS = ("completion", "response", "answer")
INPUT_FIELDS = ("input", "context")
OUTPUT_FIELDS = ("output", "response")
SYSTEM_FIELDS = ("system", "system_prompt")
FORMATS = ("chat", "prompt", "instruction", "text", "preference")


def read_fields(
    row: Values, format: str, *, paired: bool, text_field: str = "text"
) -> tuple[Sample, list[str]]:
    """The sample of a row, and its unused fields."""
    name = detect(row, paired=paired, text_field=text_field) if format == "auto" else format
    fields = Fields(row)
    sample = _text(fields, text_field) if name == "text" else _READERS[name](fields)
    return sample, fields.unused


def detect(row: Values, *, paired: bool, text_field: str = "text") -> str:
    """The format of a row, by its fields that are not null."""
    fields = Fields(row)
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


def _chat(fields: Fields) -> Conversation:
    field = fields.needed(CHAT_FIELDS, "chat")
    return _conversation(fields, read_turns(fields, field))


def _prompt(fields: Fields) -> Conversation:
    prompt, answer = fields.needed(QUESTION_FIELDS, "prompt"), fields.needed(ANSWER_FIELDS, "prompt")
    if isinstance(fields.values[prompt], list) and isinstance(fields.values[answer], list):
        return _conversation(fields, read_turns(fields, prompt) + read_turns(fields, answer))
    asked, said = read_text(fields.take(prompt), prompt), read_text(fields.take(answer), answer)
    return _conversation(fields, (Turn("user", asked), Turn("assistant", said)))


def _instruction(fields: Fields) -> Conversation:
    instruction = fields.needed(("instruction",), "instruction")
    output = fields.needed(OUTPUT_FIELDS, "instruction")
    given = fields.first(INPUT_FIELDS)
    question = read_text(fields.take(instruction), instruction)
    if given and (more := read_text(fields.take(given), given)).strip():
        question = f"{question}\n\n{more}"
    answer = Turn("assistant", read_text(fields.take(output), output))
    return _conversation(fields, (Turn("user", question), answer))


def _conversation(fields: Fields, turns: tuple[Turn, ...]) -> Conversation:
    turns = _with_system(fields, turns)
    check_order(turns)
    check_contents(turns)
    return Conversation(turns, _tools(fields))


def _tools(fields: Fields) -> str | None:
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
    return as_json(tools, "tools")


def _with_system(fields: Fields, turns: tuple[Turn, ...]) -> tuple[Turn, ...]:
    """The turns, after the system turn of a system field if there is one."""
    field = fields.first(SYSTEM_FIELDS)
    if field is None:
        return turns
    system = read_text(fields.take(field), field)
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


def _text(fields: Fields, field: str) -> Text:
    # The content of a text file is the field text.
    field = fields.needed((field, "text"), "text")
    text = read_text(fields.take(field), field)
    if not text.strip():
        raise BadRow("empty text", f"the field {field} is empty")
    return Text(text)


def _preference(fields: Fields) -> Pair:
    answers = [fields.values[fields.needed((name,), "preference")] for name in ("chosen", "rejected")]
    if all(isinstance(answer, str) for answer in answers):
        pair = _pair_of_texts(fields)
    else:
        pair = _pair_of_conversations(fields, read_turns(fields, "chosen"), read_turns(fields, "rejected"))
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


def _pair_of_texts(fields: Fields) -> Pair:
    field = fields.first(QUESTION_FIELDS)
    if field is None:
        raise BadRow(
            "no common prompt",
            f"chosen and rejected are texts and there is no field prompt; found {fields.names}. Give the prompt, or "
            "two conversations that share a beginning",
        )
    chosen, rejected = (
        Turn("assistant", read_text(fields.take(name), name)) for name in ("chosen", "rejected")
    )
    return Pair(_prompt_turns(fields, field), (chosen,), (rejected,))


def _pair_of_conversations(fields: Fields, chosen: tuple[Turn, ...], rejected: tuple[Turn, ...]) -> Pair:
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


def _prompt_turns(fields: Fields, field: str) -> tuple[Turn, ...]:
    """A prompt: a list of messages, or the text of a user turn."""
    if isinstance(fields.values[field], list):
        return read_turns(fields, field)
    return (Turn("user", read_text(fields.take(field), field)),)


def _stripped(turns: tuple[Turn, ...]) -> list[tuple[str, str, str | None]]:
    return [(turn.role, turn.content.strip(), turn.more_json) for turn in turns]


_READERS: dict[str, Callable[[Fields], Sample]] = {
    "chat": _chat,
    "prompt": _prompt,
    "instruction": _instruction,
    "preference": _preference,
}
