"""Chat templates: a model's own rule for writing a conversation as text.

A template is a small Jinja program that comes with a stranger's model, so it runs in Jinja's immutable
sandbox: it can loop and format, and cannot reach attributes of Python or change what it is given.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rush.errors import DataError


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def render(
    template: str, messages: Sequence[dict[str, Any]], add_generation_prompt: bool, **tokens: str | None
) -> str:
    """Run a chat template. `tokens` are the special tokens it may mention; absent ones are empty."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    known = {name: token or "" for name, token in tokens.items()}
    try:
        return environment.from_string(template).render(
            messages=list(messages), add_generation_prompt=add_generation_prompt, **known
        )
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise DataError(f"The chat template refuses this conversation: {error}") from error
