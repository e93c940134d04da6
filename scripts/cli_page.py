"""Write docs/cli.md from the commands themselves, so that the page cannot fall behind them."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from rush.cli import command  # noqa: E402

PAGE = ROOT / "docs" / "cli.md"

HEAD = """# Commands

Every command of `rush`, with its arguments and options. `--debug` after any of them shows the traceback of an error.
Exit codes: 2 recipe or arguments, 3 data, 4 machine or environment, 5 diverged, 130 interrupted. (This page is written by
`scripts/cli_page.py`.)
"""


def page() -> str:
    return "\n".join([HEAD, *_commands("rush", command())]).rstrip() + "\n"


def _commands(name: str, one: Any) -> Iterator[str]:
    inner = getattr(one, "commands", {})
    if name != "rush":
        yield f"## `{name}`\n"
        yield f"{_help(one)}\n"
        if not inner or one.invoke_without_command:
            usage = " ".join(
                [
                    name,
                    *(_usage(argument) for argument in one.params if argument.param_type_name == "argument"),
                ]
            )
            yield f"```text\n{usage} [OPTIONS]\n```\n"
            yield from _table(one)
    for part in sorted(inner):
        if not inner[part].hidden:
            yield from _commands(f"{name} {part}", inner[part])


def _help(one: Any) -> str:
    """Its help, the examples as a block of code."""
    text = inspect.cleandoc(one.help or "").split("\f")[0]
    lines = []
    for paragraph in re.split(r"\n\s*\n", text):
        shown = " ".join(paragraph.split())
        example = re.fullmatch(r"(?:Examples?: )?(rush .+)", shown)
        lines.append(f"    {example[1]}" if example else shown.replace("<", "&lt;"))
    return "\n\n".join(line for line in lines if line not in ("Examples:", "Example:"))


def _usage(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required or name.startswith("[") else f"[{name}]"


def _table(one: Any) -> Iterator[str]:
    rows = [
        (" or ".join(f"`{text}`" for text in [*option.opts, *option.secondary_opts]) if option.param_type_name == "option"
         else f"`{option.metavar or option.name.upper()}`",
         _cell(getattr(option, "help", None) or ""), _default(option))
        for option in one.params if option.name != "help" and not getattr(option, "hidden", False)
    ]  # fmt: skip
    if rows:
        yield "| | | default |\n| --- | --- | --- |"
        yield "\n".join(f"| {name} | {text} | {default} |" for name, text, default in rows) + "\n"


def _default(option: Any) -> str:
    value = option.default
    if callable(value) or value in (None, False, (), [], "") or "UNSET" in repr(value).upper():
        return ""
    return f"`{_cell(str(value))}`"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
