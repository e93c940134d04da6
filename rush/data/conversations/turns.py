"""Samples of fine-tuning data: a conversation, a plain text, or a pair of answers to one prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROLES = ("system", "user", "assistant", "tool")
REASONING = "reasoning_content"
MOST_TURNS = 2000
"""A template is rendered up to every answer: the time grows with the square of the turns."""


class BadRow(Exception):
    """A row that cannot be trained on. Rows are counted by `reason`; the message is a sentence."""

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class TooLong(BadRow):
    """A row longer than the sequence: `data.too_long` decides on it, `data.bad_rows` on the others."""


@dataclass(frozen=True)
class Turn:
    role: str
    content: str
    trained: bool | None = None
    """Whether it is a target, by its weight (1 or 0); None: by the objective."""
    more_json: str | None = None
    """Further fields that templates read, as a JSON object: tool_calls, tool_call_id, name, reasoning_content."""

    @property
    def more(self) -> dict[str, Any]:
        found: dict[str, Any] = {} if self.more_json is None else json.loads(self.more_json)
        return found

    @property
    def calls(self) -> list[str]:
        """The names of the functions that it calls."""
        return [call.get("function", call)["name"] for call in self.more.get("tool_calls", ())]

    @property
    def message(self) -> dict[str, Any]:
        """The turn as a chat template reads it."""
        return {"role": self.role, "content": self.content, **self.more}


@dataclass(frozen=True)
class Conversation:
    turns: tuple[Turn, ...]
    tools_json: str | None = None
    """The functions the assistant may call, as a JSON list of schemas."""

    @property
    def tools(self) -> list[Any] | None:
        found: list[Any] | None = None if self.tools_json is None else json.loads(self.tools_json)
        return found

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, str]]) -> Conversation:
        """From the usual list of `{"role": …, "content": …}`."""
        return cls(tuple(Turn(message["role"], message["content"]) for message in messages))

    @property
    def prompt(self) -> tuple[Turn, ...]:
        """The turns before the first answer."""
        roles = [turn.role for turn in self.turns]
        return self.turns[: roles.index("assistant")] if "assistant" in roles else self.turns

    @property
    def group(self) -> str:
        """Conversations of one group are in the same split, so that no held-out question is trained on."""
        return _joined(self.prompt)


@dataclass(frozen=True)
class Text:
    text: str

    @property
    def group(self) -> str:
        return self.text


@dataclass(frozen=True)
class Pair:
    """Two answers to one prompt."""

    prompt: tuple[Turn, ...]
    chosen: tuple[Turn, ...]
    rejected: tuple[Turn, ...]
    tools_json: str | None = None

    @property
    def conversations(self) -> tuple[Conversation, Conversation]:
        chosen, rejected = self.prompt + self.chosen, self.prompt + self.rejected
        return Conversation(chosen, self.tools_json), Conversation(rejected, self.tools_json)

    @property
    def group(self) -> str:
        return _joined(Conversation(self.prompt).prompt)


Sample = Conversation | Text | Pair


def _joined(turns: Sequence[Turn]) -> str:
    return "\0".join(turn.content for turn in turns)


def check_order(turns: Sequence[Turn]) -> None:
    """Check the order: an optional system turn, then user and assistant alternately, the assistant last. After an answer that
    calls tools come their results, and the next answer."""
    if len(turns) > MOST_TURNS:
        raise BadRow(
            "too many turns", f"the conversation has {len(turns):,} turns; at most {MOST_TURNS:,} are read"
        )
    roles = [turn.role for turn in turns]
    talk = list(turns[1:] if roles[:1] == ["system"] else turns)
    if not talk:
        raise BadRow("no answer", "the conversation holds no question and no answer")
    wanted: tuple[str, ...] = ("user",)
    for place, turn in enumerate(talk, start=len(turns) - len(talk)):
        if turn.role not in wanted:
            raise BadRow(
                "roles out of order",
                f"turn {place + 1} is the {turn.role}'s where the {wanted[0]}'s is due; a conversation is an optional system "
                f"turn, then user and assistant in turn (found: {', '.join(roles)})",
            )
        wanted = _following(turn)
    if talk[-1].role != "assistant":
        raise BadRow(
            "no answer", f"the last turn is the {talk[-1].role}'s, so there is no answer to it to learn from"
        )


def _following(turn: Turn) -> tuple[str, ...]:
    """The roles that may come after a turn."""
    if turn.role == "tool":
        return ("assistant", "tool")
    if turn.role == "user":
        return ("assistant",)
    return ("tool",) if turn.calls else ("user",)


def check_contents(turns: Sequence[Turn]) -> None:
    """Only a call and the result of a tool may be without a text."""
    for place, turn in enumerate(turns, start=1):
        if not turn.content.strip() and turn.role != "tool" and not turn.calls:
            what = {"assistant": "answer", "user": "question", "system": "system turn"}[turn.role]
            raise BadRow(f"empty {what}", f"turn {place}, the {turn.role}'s, is empty")
