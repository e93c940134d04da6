"""Chat templates: the tokenizer's own, or one by name.

A named template ends every turn with a special token, at which a model stops: its usual end-of-turn token if the tokenizer has
it, else the end-of-text token. The rest may be plain text, so that it works with any vocabulary. A generation prompt ends with a
line end, not a space, which would be part of the answer's first token.
"""

from __future__ import annotations

import datetime
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rush.data.chat import OWN, reads_tools, render_parts
from rush.data.conversations.turns import REASONING, Turn
from rush.data.tokenizer import Tokenizer
from rush.errors import RecipeError, nearest

_PLAIN = """\
{{- bos_token }}
{%- for message in messages %}
    {{- message['role'] | capitalize + ':\\n' + message['content'] + END + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'Assistant:\\n' }}
{%- endif %}
"""
_CHATML = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + END + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
_LLAMA_3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + END }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
_RAW = """\
{{- bos_token }}
{%- for message in messages %}
    {{- message['content'] }}
    {%- if message['role'] == 'assistant' %}{{- END }}{%- endif %}
{%- endfor %}
"""
# Template, and its end-of-turn token, used where the tokenizer has it.
_NAMED: dict[str, tuple[str, str | None]] = {
    "chatml": (_CHATML, "<|im_end|>"),
    "llama-3": (_LLAMA_3, "<|eot_id|>"),
    "plain": (_PLAIN, None),
    "raw": (_RAW, None),
}
NAMES = ("auto", *_NAMED)
OWN |= {
    source.replace("END", end)
    for source, mark in _NAMED.values()
    for end in ("eos_token", *([f"'{mark}'"] if mark else []))
}

TRAINING_DATE = datetime.date(2024, 7, 26)
"""The date for templates that write it, so that prepared data does not change."""
_MARKED = re.compile(r"\{%-?\s*generation\b")


@dataclass(frozen=True)
class Template:
    """A template with its special tokens."""

    name: str
    source: str
    bos_token: str | None
    eos_token: str | None

    @property
    def marked(self) -> bool:
        """Whether it marks the generated text."""
        return _MARKED.search(self.source) is not None

    @property
    def takes_tools(self) -> bool:
        """Whether it reads the tools of a conversation."""
        return _takes_tools(self.source)

    @property
    def writes_thoughts(self) -> bool:
        """Whether it looks at the thoughts of an answer."""
        return any(name in self.source for name in (REASONING, "thinking"))

    def render(self, turns: Sequence[Turn], *, generation: bool = False) -> str:
        return self.render_parts(turns, [(len(turns), generation)])[0]

    def render_parts(
        self,
        turns: Sequence[Turn],
        parts: Sequence[tuple[int, bool]],
        *,
        tools: Sequence[Any] | None = None,
        marks: tuple[str, str] = ("", ""),
    ) -> list[str]:
        """One text per part: the first so many turns, with or without the generation prompt."""
        return render_parts(
            self.source,
            [turn.message for turn in turns],
            parts,
            tools=tools,
            date=TRAINING_DATE,
            marks=marks,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
        )


@functools.lru_cache(maxsize=64)
def _takes_tools(source: str) -> bool:
    return reads_tools(source)


def find_template(name: str, tokenizer: Tokenizer) -> Template:
    """A template by name; `auto` is the tokenizer's own, or chatml where it has none."""
    if name == "auto":
        if tokenizer.chat_template is not None:
            return Template(
                "the tokenizer's own", tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token
            )
        name = "chatml"
    if name not in _NAMED:
        raise RecipeError(f"data.template is {name!r}, which is not a template; {nearest(name, NAMES)}")
    source, mark = _NAMED[name]
    end = f"'{mark}'" if mark in tokenizer.special_ids else "eos_token"
    return Template(name, source.replace("END", end), tokenizer.bos_token, tokenizer.eos_token)
