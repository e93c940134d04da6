"""Fields of a row, as text or as a list of items.

A path has dots: `recipe.ingredients`. Where a part is a list, the rest of the path is looked up in each element, so
`ingredients.name` are the names of all ingredients and `messages.content` is the text of a conversation. A null counts as
missing.
"""

from __future__ import annotations

import json
from typing import Any

from rush.errors import DataError

KINDS = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a table",
    type(None): "null",
}


class Missing(Exception):
    """A row lacks a field."""

    def __init__(self, field: str, row: dict[str, Any]) -> None:
        super().__init__(f"no field {field!r}")
        self.field = field
        self.found = sorted(row)


def value_at(row: dict[str, Any], path: str) -> Any:
    """The value at `path`; a list where the path goes through one."""
    found = _walk(row, path)
    if found is None:
        raise Missing(path, row)
    return found


def _walk(value: Any, path: str) -> Any:
    if isinstance(value, list):
        found = [_walk(member, path) for member in value]
        return None if None in found else found
    if not isinstance(value, dict):
        return None
    if path in value:  # a key may hold dots itself
        return value[path]
    head, _, rest = path.partition(".")
    return _walk(value[head], rest) if rest and head in value else None


def text_at(row: dict[str, Any], path: str, name: str) -> str:
    """The text at `path`; the elements of a list of texts joined by line ends."""
    value = value_at(row, path)
    if isinstance(value, str):
        return value
    texts = flat(value) if isinstance(value, list) else [value]
    if not isinstance(value, list) or not all(isinstance(text, str) for text in texts):
        wrong = next(text for text in texts if not isinstance(text, str))
        raise DataError(
            f"{name}: {path!r} holds {kind_of(wrong)}, expected text or a list of texts; "
            "name another field in the pipeline."
        )
    return "\n".join(texts)


def items_at(row: dict[str, Any], path: str, name: str, separator: str | None) -> list[Any]:
    """The elements of a list; of a text, split by `separator` or parsed as a JSON list (as in CSV)."""
    value = value_at(row, path)
    if isinstance(value, list):
        return value
    if isinstance(value, str) and separator is not None:
        return [part for part in (part.strip() for part in value.split(separator)) if part]
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            parsed = None
        if isinstance(parsed, list):
            return parsed
        raise DataError(
            f"{name}: {path!r} is text, expected a list (or a JSON list); for items in one text "
            'set the separator, as in separator = ",".'
        )
    raise DataError(f"{name}: {path!r} is {kind_of(value)}, expected a list; name another field.")


def plain_items(items: list[Any], path: str, name: str, ignore_case: bool) -> list[str]:
    """Items as texts to count: nested lists flattened, white space stripped."""
    texts = []
    for item in flat(items):
        if isinstance(item, dict):
            keys = ", ".join(sorted(item))
            raise DataError(
                f"{name}: the items of {path!r} are tables with the keys {keys}; name the key to count, "
                f"as in field = {f'{path}.{sorted(item)[0]}' if item else path!r}."
            )
        text = item.strip() if isinstance(item, str) else json.dumps(item)
        texts.append(text.casefold() if ignore_case else text)
    return texts


def flat(values: list[Any]) -> list[Any]:
    """A list with nested lists flattened."""
    return [inner for value in values for inner in (flat(value) if isinstance(value, list) else [value])]


def kind_of(value: object) -> str:
    return KINDS.get(type(value), type(value).__name__)
