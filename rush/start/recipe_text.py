"""The recipe as a file for people: every key that was decided, with its reason above it."""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from rush.recipe import Recipe
from rush.recipe_io import parse, toml_value

WIDTH = 110


def recipe_text(
    recipe: Recipe, tree: Mapping[str, Any], reasons: Mapping[str, str], head: Sequence[str]
) -> str:
    """TOML with comments; reading it back gives the recipe."""
    lines = [line for paragraph in head for line in _comment(paragraph)]
    for key, value in tree.items():
        if not isinstance(value, dict):
            lines += [*_comment(reasons.get(key, "")), *_assignment(key, value)]
    for section, values in tree.items():
        if isinstance(values, dict) and values:
            lines += ["", f"[{section}]"]
            for key, value in values.items():
                lines += [*_comment(reasons.get(f"{section}.{key}", "")), *_assignment(key, value)]
    text = "\n".join(lines) + "\n"
    assert parse(tomllib.loads(text), auto=True) == recipe, "the written recipe is another one"
    return text


def _comment(text: str) -> list[str]:
    # A file name is untrusted; a comment must be one line of printable text.
    plain = "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
    return [f"# {line}" for line in textwrap.wrap(plain, WIDTH - 2)]


def _assignment(key: str, value: Any) -> list[str]:
    line = f"{key} = {toml_value(value)}"
    if isinstance(value, list) and len(line) > WIDTH:
        return [f"{key} = [", *(f"  {toml_value(item)}," for item in value), "]"]
    return [line]
