"""Chat templates: render a conversation as text.

A template is a Jinja program of an untrusted model: it is rendered in the restricted child, with limits on
time and memory (`rush/data/guarded`). Our own templates are rendered here.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from rush.data.guarded import rendering
from rush.data.guarded.process import Exhausted, Refused, ask
from rush.errors import DataError

CPU_S, CPU_S_PER_MB = 0.5, 1.0
MEMORY_BYTES, MEMORY_PER_BYTE = 1 << 30, 50
REFUSES = "The chat template refuses this conversation"
OWN: set[str] = set()
"""The templates that come with rush."""
_dead: dict[str, str] = {}
"""Templates that reached a limit, with the message: they are not run again."""


def render(
    template: str, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **options: Any
) -> str:
    """Render a chat template; the options are those of `render_parts`."""
    return render_parts(template, messages, [(len(messages), add_generation_prompt)], **options)[0]


def render_parts(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    parts: Sequence[tuple[int, bool]],
    *,
    tools: Sequence[Any] | None = None,
    date: datetime.date | None = None,
    marks: tuple[str, str] = ("", ""),
    settings: Mapping[str, Any] | None = None,
    continued: bool = False,
    **tokens: str | None,
) -> list[str]:
    """One text per part: the first so many messages, with or without the generation prompt.

    `tools` are the functions the model may call, as JSON schemas. `tokens` are the special tokens a template may use; to the
    template, those that are None are undefined. `date` is the current date for templates that write it; `marks` are written
    around `{% generation %}`. `settings` are further variables (enable_thinking). `continued` leaves the last message open, for
    a model to continue it.
    """
    if continued and any(generation for _, generation in parts):
        raise DataError(
            "A message that is to be continued leaves no room for a generation prompt: ask for one of the two."
        )
    arguments = {
        "template": template,
        "messages": list(messages),
        "parts": list(parts),
        "tools": None if tools is None else list(tools),
        "date": None if date is None else date.isoformat(),
        "marks": marks,
        "tokens": {name: token for name, token in tokens.items() if token is not None},
        "settings": dict(settings or {}),
        "continued": continued,
    }
    texts: list[str] = _run(template, "render_parts", arguments, _size(messages, tools) * len(parts))
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                "The chat template writes half of a surrogate pair, which no encoding can write."
            ) from error
    return texts


def reads_tools(template: str) -> bool:
    """Whether a template looks at the variable `tools`."""
    return bool(_run(template, "reads_tools", {"template": template}, len(template)))


def _run(template: str, call: str, arguments: dict[str, Any], num_bytes: int) -> Any:
    if template in OWN:
        try:
            return getattr(rendering, call)(**arguments)
        except jinja2.TemplateError as error:
            raise DataError(f"{REFUSES}: {str(error).rstrip('.')}.") from error
    if template in _dead:
        raise DataError(_dead[template])
    try:
        return ask(
            "rendering",
            call,
            arguments,
            cpu_s=CPU_S + CPU_S_PER_MB * num_bytes / 1e6,
            memory_bytes=MEMORY_BYTES + MEMORY_PER_BYTE * num_bytes,
        )
    except Refused as error:
        raise DataError(f"{REFUSES}: {str(error).rstrip('.')}.") from error
    except Exhausted as error:
        _dead[template] = (
            f"The chat template {error} (allowed are {CPU_S:g} s and {MEMORY_BYTES >> 30} GiB, more for long "
            "conversations). Use another template: set data.template to chatml, llama-3 or plain."
        )
        raise DataError(_dead[template]) from error


def _size(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> int:
    return sum(len(str(message)) for message in messages) + len(str(tools or ""))
