"""Write docs/recipes.md from the recipe's own definition, so that the page cannot fall behind it."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from pydantic import BaseModel  # noqa: E402

from rush.recipe import Recipe  # noqa: E402

PAGE = ROOT / "docs" / "recipes.md"

HEAD = """# Recipes

A recipe is a TOML file. Every key below can be changed on the command line as `key=value`; a list takes
`techniques+=compile` and `techniques-=compile` too. Unknown keys and wrong types are refused with the
nearest known key. `rush recipes show NAME` prints a recipe with every default written out,
`rush recipes schema` the JSON Schema for editors. (This page is written by `scripts/recipe_page.py`.)
"""


def page() -> str:
    lines = [HEAD]
    schema = Recipe.model_json_schema()
    top: list[str] = []
    for name, field in Recipe.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            lines += [f"## `[{name}]`\n", *_table(schema["$defs"][field.annotation.__name__]), ""]
        else:
            top.append(name)
    outside = {**schema, "properties": {name: schema["properties"][name] for name in top}}
    lines.insert(1, "\n".join(["## At the top\n", *_table(outside), ""]))
    return "\n".join(lines)


def _table(part: dict[str, object]) -> list[str]:
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    required = part.get("required", [])
    for name, field in part["properties"].items():  # type: ignore[attr-defined]
        default = "**required**" if name in required else f"`{_default(field.get('default'))}`"
        rows.append(
            f"| `{name}` | {_type(field)} | {default} | {field.get('description', '').replace(chr(10), ' ')} |"
        )
    return rows


def _default(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else f'"{value}"' if isinstance(value, str) else str(value)


def _type(field: dict[str, object]) -> str:
    if "enum" in field:
        return " or ".join(f"`{item}`" for item in field["enum"])  # type: ignore[attr-defined]
    if "const" in field:
        return f"`{field['const']}`"
    if "anyOf" in field:
        kinds = [_type(kind) for kind in field["anyOf"] if kind.get("type") != "null"]  # type: ignore[attr-defined]
        return " or ".join(dict.fromkeys(kinds))
    names = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false"}
    kind = str(field.get("type", ""))
    if kind == "array":
        return f"list of {_type(field['items'])}"  # type: ignore[arg-type]
    limits = [
        f"{sign} {field[key]:,}"
        for key, sign in (
            ("minimum", "≥"),
            ("exclusiveMinimum", ">"),
            ("maximum", "≤"),
            ("exclusiveMaximum", "<"),
        )
        if key in field
    ]
    return " ".join([names.get(kind, "table"), ", ".join(limits)]).strip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
