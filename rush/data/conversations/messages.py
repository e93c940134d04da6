"""The messages of a row: role, text, weight, and what else a chat template reads of them.

Tool calls have arguments as an object, also where a dataset wrote them as a JSON text. The thoughts of an answer have one name,
whatever a dataset calls them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rush.data.conversations.turns import REASONING, ROLES, BadRow, Turn

Values = Mapping[str, Any]

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# Other names of the roles in published data.
_ALIASES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
    "function": "tool", "observation": "tool", "ipython": "tool",
}  # fmt: skip


class Fields:
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


def read_turns(fields: Fields, field: str) -> tuple[Turn, ...]:
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
        inner = Fields(message)
        turns.append(_turn(inner, where))
        fields.deeper |= {f"{field}[].{name}" for name in inner.unused}
    return tuple(turns)


def _turn(message: Fields, where: str) -> Turn:
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
        content = "".join(read_text(part.get("text"), f"{where}.content") for part in content)
    trained = _trained(message.take("weight"), where)
    return Turn(
        known,
        read_text(content, f"{where}.content"),
        trained,
        as_json(more, f"{where}'s fields") if more else None,
    )


def _more(message: Fields, role: str, where: str) -> dict[str, Any]:
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
                more[name] = read_text(value, f"{where}.{name}")
    field = message.first(REASONING_FIELDS) if role == "assistant" else None
    if field is not None and (thoughts := read_text(message.take(field), f"{where}.{field}")):
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


def as_json(value: Any, what: str) -> str:
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


def read_text(value: Any, field: str) -> str:
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
