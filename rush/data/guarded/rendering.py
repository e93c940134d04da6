"""Render chat templates with Jinja's immutable sandbox, as transformers does.

A template can loop and format, but cannot access Python attributes or change its input. It can still use
unlimited time and memory, so untrusted ones are rendered in the restricted child. This file imports nothing
from rush: the child loads it alone.

Some templates mark the assistant's text with `{% generation %}` and `{% endgeneration %}`; marks can be written there. A
message that is to be continued ends its text: what the template writes after it (an end-of-turn token) is cut away.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.parser
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Dict:
    """`dict(…)` of a template, without the attributes of the type."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(…)` of a template; names with an underscore in front are Python's own."""

    def __init__(*args: Any, **values: Any) -> None:  # a template may use the name self
        given = dict(*args[1:], **values)
        for name in given:
            _check_name(name)
        jinja2.utils.Namespace.__init__(args[0], given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"a namespace cannot have the attribute {name!r}, which begins with an underscore"
        )


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` … `{% endgeneration %}`: the body between two marks (empty by default)."""

    tags = {"generation"}  # noqa: RUF012 — Jinja's way to register a tag

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def mark(name: str) -> nodes.Output:
            return nodes.Output([nodes.Name(name, "load")], lineno=line)

        return [mark("generation_begins"), nodes.Scope(body, lineno=line), mark("generation_ends")]


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def reads_tools(template: str) -> bool:
    """Whether a template looks at the variable `tools` at all."""
    return "tools" in jinja2.meta.find_undeclared_variables(_environment().parse(template))


REASONING = ("reasoning_content", "thinking", "reasoning")
"""What the thoughts of an answer are called: templates read the first, some the second."""


def render_parts(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    parts: Sequence[tuple[int, bool]],
    *,
    tools: list[Any] | None,
    date: str | None,
    marks: tuple[str, str],
    tokens: Mapping[str, str],
    settings: Mapping[str, Any],
    continued: bool,
) -> list[str]:
    """One text per part: the first so many messages, with or without the generation prompt.

    Several at once, because each question to the child takes as long as a short rendering. With `continued` the last message of
    a part is left open. `settings` are further variables of the template, as enable_thinking.
    """
    day = datetime.datetime.now() if date is None else datetime.datetime.fromisoformat(date)
    compiled = _compile(template)
    named = [_with_reasoning(message) for message in messages]
    texts = []
    for stop, generation in parts:
        shown = _with_mark(named[:stop]) if continued else named[:stop]
        text = compiled.render(
            messages=shown,
            add_generation_prompt=generation,
            tools=tools,
            documents=None,
            strftime_now=day.strftime,
            generation_begins=marks[0],
            generation_ends=marks[1],
            **tokens,
            **settings,
        )
        texts.append(_cut_at_mark(text, named[stop - 1]) if continued else text)
    return texts


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its thoughts under both names that templates read."""
    found = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if found is None:
        return dict(message)
    return {"thinking": found, **message, "reasoning_content": found}


_MARK = "\ufdef"
_OPEN = f"{_MARK}continued{_MARK} "
"""Ends the text of a message that is to be continued. Its space shows whether the template trims the text."""


def _with_mark(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    last = messages[-1] if messages else {}
    content = last.get("content")
    if isinstance(content, str):
        marked: Any = content + _OPEN
    elif isinstance(content, list) and any("text" in part for part in content):
        at = max(place for place, part in enumerate(content) if "text" in part)
        marked = [
            {**part, "text": part["text"] + _OPEN} if place == at else part
            for place, part in enumerate(content)
        ]
    else:
        raise jinja2.TemplateError("the last message has no text that could be continued")
    return [*messages[:-1], {**last, "content": marked}]


def _cut_at_mark(text: str, message: Mapping[str, Any]) -> str:
    content = message["content"]
    if not isinstance(content, str):
        content = [part["text"] for part in content if "text" in part][-1]
    at = text.rfind(_OPEN.strip())
    if at < 0 or content.strip() not in text:
        raise jinja2.TemplateError("the template does not write the message that is to be continued")
    kept = text[:at]
    return kept if text[at : at + len(_OPEN)] == _OPEN else kept.rstrip()
