"""Render chat templates with Jinja's immutable sandbox, as transformers does.

A template can loop and format, and cannot reach Python attributes or change its input. It can still use all time and memory
there is, so those of strangers are rendered in the guarded child. This file imports nothing of rush: the child loads it alone.

Some templates mark the assistant's text with `{% generation %}` and `{% endgeneration %}`; marks can be written there.
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
    return environment


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    return _environment().from_string(template)


def reads_tools(template: str) -> bool:
    """Whether a template looks at the variable `tools` at all."""
    return "tools" in jinja2.meta.find_undeclared_variables(_environment().parse(template))


def render_parts(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    parts: Sequence[tuple[int, bool]],
    *,
    tools: list[Any] | None,
    date: str | None,
    marks: tuple[str, str],
    tokens: Mapping[str, str],
) -> list[str]:
    """One text per part: the first so many messages, with or without the generation prompt.

    Several at once, because each question to the child takes as long as a short rendering.
    """
    day = datetime.datetime.now() if date is None else datetime.datetime.fromisoformat(date)
    compiled = _compile(template)
    return [
        compiled.render(
            messages=list(messages[:stop]),
            add_generation_prompt=generation,
            tools=tools,
            documents=None,
            strftime_now=day.strftime,
            generation_begins=marks[0],
            generation_ends=marks[1],
            **tokens,
        )
        for stop, generation in parts
    ]
