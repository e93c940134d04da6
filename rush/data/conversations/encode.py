"""Encode a conversation as token ids, and find which of them are targets.

Answers are found by the structure of the template, not by searching the text. The conversation is rendered up to each answer
with the generation prompt, and again with the answer; each rendering must start with the one before, and the rest is the answer
with its end-of-turn token. A template that rewrites earlier turns is refused, unless it marks its answers (`{% generation %}`).

The text is split at answer boundaries, and each piece is encoded by itself. So the prompt has the same tokens as in generation:
encoded at once, the line end before an answer and its first letters could merge into one token.

Names of control tokens inside a turn are plain text: `<|im_end|>` in a question ends nothing, `<think>` begins no thought.
Every character of such a turn is guarded with a Unicode noncharacter, which is removed after the real control tokens have been
found. Only an answer may hold control tokens that are not special: a model that thinks has to learn to write `<think>`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rush.data.conversations.templates import Template
from rush.data.conversations.turns import REASONING, BadRow, Conversation, Text, Turn
from rush.data.tokenizer import Tokenizer
from rush.errors import DataError

# Unicode reserves these for internal use: texts do not have them. (If one does, others are used.)
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
# Characters that a text follows without a space, to encode a text as a continuation.
_ANCHORS = ("\n", ":", ">", ".")


@dataclass(frozen=True)
class Encoded:
    """Token ids, and for each whether it is a target: a label for the position before it."""

    tokens: list[int]
    trained: list[bool]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def num_trained(self) -> int:
        return sum(self.trained)


@dataclass(frozen=True)
class _Piece:
    """A piece of the rendered text. Answers are numbered from 0; -1 is text between them."""

    text: str
    answer: int


def encode(
    conversation: Conversation | Text,
    tokenizer: Tokenizer,
    template: Template,
    train_on: str = "completion",
    *,
    prompt_turns: int = 0,
) -> Encoded:
    """Encode a conversation or a text. Answers in the first `prompt_turns` turns are context only, and so are those with a weight
    of 0."""
    if isinstance(conversation, Text):
        return _encode_text(conversation.text, tokenizer)
    _check_weights(conversation.turns, train_on)
    encoder = _encoder(tokenizer, template)
    first = sum(turn.role == "assistant" for turn in conversation.turns[:prompt_turns])
    left_out = _left_out(conversation.turns)
    tokens: list[int] = []
    trained: list[bool] = []
    for piece, ids in encoder.pieces(conversation, generation=False):
        tokens += ids
        wanted = (train_on == "all" or piece.answer >= first) and piece.answer not in left_out
        trained += [wanted] * len(ids)
    encoder.check(tokens)
    if trained:
        trained[0] = False  # there is no position before it
    if not any(trained):
        why = "every answer has the weight 0" if left_out else "the template leaves no token that is a target"
        raise BadRow("nothing to train on", why)
    return Encoded(tokens, trained)


def _left_out(turns: Sequence[Turn]) -> set[int]:
    """The numbers of the answers with weight 0."""
    answers = [turn for turn in turns if turn.role == "assistant"]
    return {number for number, turn in enumerate(answers) if turn.trained is False}


def _check_weights(turns: Sequence[Turn], train_on: str) -> None:
    """Refuse a weight of a question that contradicts objective.train_on."""
    for place, turn in enumerate(turns, start=1):
        if turn.role == "assistant" or turn.trained is None or turn.trained == (train_on == "all"):
            continue
        raise BadRow(
            "weight of a question",
            f"turn {place}, the {turn.role}'s, has the weight {int(turn.trained)}, but objective.train_on = {train_on!r} "
            f"{'does not train it' if turn.trained else 'trains it'}; only an answer is trained or not by its weight",
        )


def encode_prompt(conversation: Conversation, tokenizer: Tokenizer, template: Template) -> list[int]:
    """The prompt tokens for generation: those that `encode` has before the answer."""
    encoder = _encoder(tokenizer, template)
    tokens = [token for _, ids in encoder.pieces(conversation, generation=True) for token in ids]
    encoder.check(tokens)
    return tokens


def _encode_text(text: str, tokenizer: Tokenizer) -> Encoded:
    """A plain text is all target, including its end-of-text token."""
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    tokens = [*begin, *tokenizer.encode(text, specials=False), tokenizer.eos_id]
    return Encoded(tokens, [False] + [True] * (len(tokens) - 1))


def controls_in(turns: Sequence[Turn], tokenizer: Tokenizer) -> set[str]:
    """The control tokens that turns spell out, each with what becomes of it, for a table."""
    found: set[str] = set()
    for turn in turns:
        for name in _pattern(tuple(tokenizer.control_ids)).findall(turn.content):
            learned = turn.role == "assistant" and name not in tokenizer.special_ids
            found.add(
                f"{name} in answers (the token)" if learned else f"{name} in {turn.role} turns (as text)"
            )
    return found


@functools.lru_cache(maxsize=8)
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    """Matches any of these names, the longest first."""
    ordered = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")


@functools.lru_cache(maxsize=8)
def _encoder(tokenizer: Tokenizer, template: Template) -> _Encoder:
    return _Encoder(tokenizer, template)


@dataclass(frozen=True)
class _Encoder:
    tokenizer: Tokenizer
    template: Template

    @functools.cached_property
    def specials(self) -> re.Pattern[str]:
        return _pattern(tuple(self.tokenizer.special_ids))

    @functools.cached_property
    def controls(self) -> re.Pattern[str]:
        return _pattern(tuple(self.tokenizer.control_ids))

    @functools.cached_property
    def adds_space(self) -> bool:
        """Whether the tokenizer adds a space before a text, as SentencePiece tokenizers do."""
        encode = self.tokenizer.encode
        return encode("\nab") != encode("\n") + encode("ab")

    def pieces(self, conversation: Conversation, *, generation: bool) -> list[tuple[_Piece, list[int]]]:
        """The pieces of the rendered conversation with their ids; with `generation`, up to the next answer."""
        _check_turns_appear(self.template, tuple(map(_outline, conversation.turns)))
        if conversation.tools_json is not None:
            _check_tools_appear(self.template, conversation)
        text, guard, answers = self._rendered(conversation, generation)
        pieces = _split(text, answers)
        if not generation and pieces[-1].answer < 0 and not pieces[-1].text.strip():
            pieces.pop()  # the line end after the last turn
        found = []
        before = ""
        for piece in pieces:
            found.append((piece, self._ids(piece.text, guard, before)))
            before = piece.text
        return found

    def _rendered(
        self, conversation: Conversation, generation: bool
    ) -> tuple[str, str, list[tuple[int, int]]]:
        """The guarded text, the guard, and the start and end of each answer."""
        turns, tools = conversation.turns, conversation.tools
        content = "".join(turn.content + (turn.more_json or "") for turn in turns)
        content += json.dumps(tools, ensure_ascii=False) if tools else ""
        free = [mark for mark in _NONCHARACTERS if mark not in content]
        if len(free) < 3:
            raise BadRow(
                "unreadable characters", "the turns hold all the noncharacters that Unicode reserves"
            )
        guard, *marks = free[:3]
        guarded = [self._guarded_turn(turn, guard) for turn in turns]
        tools = _each_text(tools, lambda text: self._guarded(Turn("system", text), guard), self.controls)
        if self.template.marked:
            text, answers = self._marked_answers(guarded, tools, (marks[0], marks[1]), generation)
        else:
            text, answers = self._nested_answers(guarded, tools, generation)
        if f"\\u{ord(guard):04x}" in text:
            raise BadRow(
                "unreadable characters",
                "the template writes the name of a control token in JSON of ASCII letters, where it cannot be told from the token",
            )
        return text, guard, [self._with_its_end(text, start, stop) for start, stop in answers]

    def _guarded_turn(self, turn: Turn, guard: str) -> Turn:
        if turn.more_json is None:
            return replace(turn, content=self._guarded(turn, guard))
        more = _each_text(
            turn.more, lambda text: self._guarded(replace(turn, content=text), guard), self.controls
        )
        return replace(
            turn, content=self._guarded(turn, guard), more_json=json.dumps(more, ensure_ascii=False)
        )

    def _guarded(self, turn: Turn, guard: str) -> str:
        """White space is not guarded, so that templates can trim it; nor the marks of an answer that are not special."""
        pattern = self.specials if turn.role == "assistant" else self.controls
        if not (pattern.search(turn.content) or self.tokenizer.hides_controls):
            return turn.content
        if turn.role != "assistant":
            return re.sub(r"(?=\S)", guard, turn.content)
        parts = re.split(f"({self.controls.pattern})", turn.content)
        special = self.tokenizer.special_ids
        return "".join(
            part if place % 2 and part not in special else re.sub(r"(?=\S)", guard, part)
            for place, part in enumerate(parts)
        )

    def _nested_answers(
        self, turns: list[Turn], tools: Any, generation: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        places = [place for place, turn in enumerate(turns) if turn.role == "assistant"]
        parts = [part for place in places for part in ((place, True), (place + 1, False))]
        full, *texts = self.template.render_parts(turns, [(len(turns), generation), *parts], tools=tools)
        answers: list[tuple[int, int]] = []
        for before, after in zip(texts[::2], texts[1::2], strict=True):
            if not (after.startswith(before) and full.startswith(after)):
                raise DataError(
                    f"The template ({self.template.name}) writes the turns before answer {len(answers) + 1} differently "
                    "when more follows, so what is learned would not be what generation sees. Mark the answers in it "
                    "with {% generation %} … {% endgeneration %}, or set data.template to chatml, llama-3 or plain."
                )
            answers.append((len(before), len(after)))
        return full, answers

    def _marked_answers(
        self, turns: list[Turn], tools: Any, marks: tuple[str, str], generation: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        (rendered,) = self.template.render_parts(turns, [(len(turns), generation)], tools=tools, marks=marks)
        parts = re.split(f"([{marks[0]}{marks[1]}])", rendered)
        text, start = "", 0
        answers: list[tuple[int, int]] = []
        for part in parts:
            if part == marks[0]:
                start = len(text)
            elif part == marks[1]:
                answers.append((start, len(text)))
            else:
                text += part
        wanted = sum(turn.role == "assistant" for turn in turns)
        if len(answers) != wanted:
            raise DataError(
                f"The template ({self.template.name}) marks {len(answers)} answers with {{% generation %}} in a "
                f"conversation that has {wanted}; every answer must be marked once."
            )
        return text, answers

    def _with_its_end(self, text: str, start: int, stop: int) -> tuple[int, int]:
        """Extend an answer to its end-of-turn token, without which a model would not learn to stop."""
        ends = [found.end() for found in self.specials.finditer(text, start, stop)]
        if ends and not text[ends[-1] : stop].strip():
            return start, ends[-1]
        # Marks may exclude the end-of-turn token.
        following = self.specials.match(text, stop) if self.template.marked else None
        if following is None:
            raise DataError(
                f"The template ({self.template.name}) writes no special token after an answer, so a model would not "
                "learn to stop. Let it write {{ eos_token }} there, or set data.template to chatml, llama-3 or plain."
            )
        return start, following.end()

    def _ids(self, text: str, guard: str, before: str) -> list[int]:
        if guard not in text:
            return self._inside(text, before, self.tokenizer.encode)
        # Real control tokens are found first; the text between them is plain.
        plain = self.tokenizer.encode_plain
        ids: list[int] = []
        at = 0
        for found in re.finditer(f"(?<!{guard})(?:{self.controls.pattern})", text):
            ids += self._inside(text[at : found.start()].replace(guard, ""), before, plain)
            ids.append(self.tokenizer.control_ids[found.group()])
            at, before = found.end(), found.group()
        return ids + self._inside(text[at:].replace(guard, ""), before, plain)

    def _inside(self, text: str, before: str, encode: Callable[[str], list[int]]) -> list[int]:
        """The ids of a text that continues `before`, without an added space."""
        if not text:
            return []
        if not self.adds_space or not before:
            return encode(text)
        ends = [found.group() for found in self.specials.finditer(before) if found.end() == len(before)]
        for anchor in (*ends[-1:], *_ANCHORS):
            lead = encode(anchor)
            ids = encode(anchor + text)
            if ids[: len(lead)] == lead:
                return ids[len(lead) :]
        return encode(text)

    def check(self, tokens: list[int]) -> None:
        bos = self.tokenizer.bos_id
        if bos is not None and tokens[:2] == [bos, bos]:
            raise DataError(
                f"The template ({self.template.name}) writes {self.tokenizer.bos_token} twice at the beginning. Remove one "
                "from the template: the model was trained with one."
            )


def _split(text: str, answers: list[tuple[int, int]]) -> list[_Piece]:
    pieces, at = [], 0
    for number, (start, stop) in enumerate(answers):
        pieces += [_Piece(text[at:start], -1), _Piece(text[start:stop], number)]
        at = stop
    return [*pieces, _Piece(text[at:], -1)]


def _outline(turn: Turn) -> Turn:
    """A turn without its text, but not without its calls: all that decides whether a template writes it."""
    return replace(turn, content="…" if turn.content.strip() else "", trained=None)


@functools.lru_cache(maxsize=4096)
def _check_turns_appear(template: Template, outlines: tuple[Turn, ...]) -> None:
    """Check that the template writes every turn, once per sequence of roles; and the calls and thoughts of answers."""
    turns = [
        replace(turn, content=f"turn{place}of{len(outlines)}" if turn.content else "")
        for place, turn in enumerate(outlines)
    ]
    text = template.render(turns)
    roles = ", ".join(turn.role for turn in turns)
    missing = [
        f"{place} ({turn.role})" for place, turn in enumerate(turns, start=1) if turn.content not in text
    ]
    if missing:
        raise DataError(
            f"The template ({template.name}) drops turn {', '.join(missing)} of a conversation of {roles}: "
            "what it leaves out would silently not be learned from. Use another template, or remove such turns."
        )
    for place, turn in enumerate(turns, start=1):
        if lost := [name for name in turn.calls if name not in text]:
            raise BadRow(
                "tool calls",
                f"turn {place} calls {lost[0]}, which the template ({template.name}) does not write; use the template of a model "
                "that was trained with tools",
            )
        if REASONING in turn.more and not template.writes_thoughts:
            raise BadRow(
                "thoughts",
                f"turn {place} has thoughts ({REASONING}), which the template ({template.name}) does not write; use the template of "
                "a model that thinks, or remove the field",
            )


@functools.lru_cache(maxsize=4096)
def _check_tools_appear(template: Template, conversation: Conversation) -> None:
    """Check that the template writes the tools: what it leaves out, a model would call without having seen."""
    if template.takes_tools:
        parts = [(len(conversation.turns), False)]
        with_tools = template.render_parts(conversation.turns, parts, tools=conversation.tools)
        if with_tools != template.render_parts(conversation.turns, parts):
            return
    raise BadRow(
        "tools",
        f"the row has tools, which the template ({template.name}) does not write; use the template of a model that was "
        "trained with tools, or remove the field",
    )


def _each_text(value: Any, change: Callable[[str], str], controls: re.Pattern[str]) -> Any:
    """A JSON value with every text in it changed; also names that hold a control token (templates look for the others)."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_each_text(item, change, controls) for item in value]
    if isinstance(value, dict):
        return {
            change(name) if controls.search(name) else name: _each_text(item, change, controls)
            for name, item in value.items()
        }
    return value
