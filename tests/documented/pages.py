"""The commands of a page, and what the page says about running them.

A page lists what is special in a comment before the block (or, in the README, before the table), a line each:

    <!-- run:
    gpu | rush bench kernels
    begin | rush train gpt2-124m
    swap | rush tune recipe.toml | 15m | 1m
    not | make test | it is this suite
    -->

The second part is the beginning of the command. `gpu`: in `make test-gpu`. `begin`: interrupted as by Ctrl-C once it has
made two steps or measured one rung or kernel. `serve`: answers a request, then is interrupted. `swap`: run with a
shorter budget or size in place of what is written. `not`: never run, with the reason. `gpu begin` and the like combine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("docs/finetuning/*.md")),
    *sorted(ROOT.glob("docs/tutorials/*.md")),
]
KINDS = ("gpu", "begin", "serve", "swap", "not")
PART = re.compile(r"<!-- run:\n(?P<marks>.*?)-->|```sh\n(?P<block>.*?)```|(?P<row>^\|[^\n]*`rush [^\n]*$)", re.DOTALL | re.MULTILINE)  # fmt: skip


@dataclass(frozen=True)
class Mark:
    kinds: tuple[str, ...]
    start: str
    rest: tuple[str, ...]


@dataclass(frozen=True)
class Command:
    page: Path
    line: str
    """As typed, without its comment."""
    mark: Mark | None
    block: int = 0
    """Which block of its page it stands in; the rows of a table are one."""

    def has(self, kind: str) -> bool:
        return self.mark is not None and kind in self.mark.kinds

    @property
    def reason(self) -> str:
        return self.mark.rest[0] if self.mark and self.has("not") and self.mark.rest else ""

    @property
    def to_run(self) -> str:
        """The line with what `swap` shortens."""
        if not self.has("swap"):
            return self.line
        assert self.mark is not None
        long, short = self.mark.rest
        assert long in self.line, f"{self.page.name}: {long!r} is not in {self.line!r}"
        return self.line.replace(long, short)


def commands(page: Path) -> list[Command]:
    """The commands of a page in their order."""
    found, unused, block = [], [], 0
    pending: list[Mark] = []
    for part in PART.finditer(page.read_text("utf-8")):
        if part["marks"] is not None:
            pending = [_mark(line, page) for line in part["marks"].splitlines() if line.strip()]
            unused += pending
            continue
        block += bool(part["block"])
        for line in _lines(part["block"]) if part["block"] else _inline(part["row"], page):
            mark = next((one for one in pending if line.startswith(one.start)), None)
            found.append(Command(page, line, mark, block))
            unused = [one for one in unused if one is not mark]
        if part["block"]:
            pending = []
    assert not unused, f"{page.name} marks commands that it does not show: {[one.start for one in unused]}"
    return found


def _mark(line: str, page: Path) -> Mark:
    kinds, *rest = (part.strip() for part in line.split("|"))
    assert rest, f"{page.name}: a mark is KIND | COMMAND | …; found {line!r}"
    assert set(kinds.split()) <= set(KINDS), f"{page.name}: {kinds!r} is no kind of mark; there are {KINDS}"
    return Mark(tuple(kinds.split()), rest[0], tuple(rest[1:]))


def _lines(block: str) -> Iterator[str]:
    for line in block.replace("\\\n", " ").splitlines():
        bare = re.sub(r"(^|\s+)#\s.*$", "", line).strip()
        if bare:
            yield re.sub(r"\s+", " ", bare)


def _inline(row: str, page: Path) -> Iterator[str]:
    """The commands in a row of the README's table; names alone are no commands."""
    if page == ROOT / "README.md":
        yield from (f for f in re.findall(r"`(rush [^`]+)`", row) if " " in f.removeprefix("rush ") or f in WHOLE)  # fmt: skip


WHOLE = ("rush recipes", "rush ladder")
"""Commands that need no argument."""
