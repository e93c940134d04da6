"""Chat templates: render a conversation as text.

A template is a Jinja program of an untrusted model, so it runs in Jinja's immutable sandbox: it can loop and format, and cannot
reach Python attributes or change its input. Some templates mark the assistant's text with `{% generation %}` and
`{% endgeneration %}`; `render` can write marks there.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.parser
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rush.errors import DataError


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` … `{% endgeneration %}`: the body between two marks (empty by default)."""

    tags = {"generation"}  # noqa: RUF012 — Jinja's way to register a tag

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def mark(name: str) -> nodes.Output:
            return nodes.Output([nodes.Name(name, "load")], lineno=line)

        return [mark("generation_begins"), nodes.Scope(body, lineno=line), mark("generation_ends")]


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(template)


def render(
    template: str,
    messages: Sequence[dict[str, Any]],
    add_generation_prompt: bool,
    *,
    date: datetime.date | None = None,
    marks: tuple[str, str] = ("", ""),
    **tokens: str | None,
) -> str:
    """Render a chat template. `tokens` are the special tokens it may use; missing ones are empty.

    `date` is the current date for templates that write it; `marks` are written around `{% generation %}` blocks.
    """
    day = datetime.datetime.now() if date is None else datetime.datetime.combine(date, datetime.time())
    known = {name: token or "" for name, token in tokens.items()}
    try:
        return _compile(template).render(
            messages=list(messages),
            add_generation_prompt=add_generation_prompt,
            strftime_now=day.strftime,
            generation_begins=marks[0],
            generation_ends=marks[1],
            **known,
        )
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"The chat template refuses this conversation: {error}") from error
