"""A planted bug is data: a few lines of `rush/` as they are, the same lines with a mistake, and the tests that must go red.

Every file of `bugs/` is an area, with a table per bug:

    [[bug]]
    name = "labels-off-by-one"
    what = "Labels are shifted by two positions instead of one"
    file = "rush/data/loader.py"
    old = '''…'''                   # found exactly once in the file, or the suite says so: it stays in step with the code
    new = '''…'''
    tests = ["tests/data/test_data_loader.py::test_…"]

The tests are a promise that can be kept quickly: one to three, none of them slow.
"""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AREAS = Path(__file__).parent / "bugs"
KEYS = {"name", "what", "file", "old", "new", "tests"}


class BugDoesNotFit(Exception):
    """A bug and the code are out of step."""


@dataclass(frozen=True)
class Bug:
    area: str
    name: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted_in(self, source: str) -> str:
        """The source with the bug."""
        found = source.count(self.old)
        if found != 1:
            raise BugDoesNotFit(
                f"{self.area}/{self.name}: `old` occurs {found} times in {self.file}, not once; adapt it to today's code."
            )
        planted = source.replace(self.old, self.new)
        if planted == source:
            raise BugDoesNotFit(f"{self.area}/{self.name}: `new` is the same as `old`.")
        try:
            ast.parse(planted)
        except SyntaxError as error:
            raise BugDoesNotFit(
                f"{self.area}/{self.name}: {self.file} with the bug is no Python: {error}."
            ) from error
        return planted


def area_of(file: Path) -> list[Bug]:
    """The bugs in one file."""
    rows = tomllib.loads(file.read_text(encoding="utf-8"))["bug"]
    for row in rows:
        if set(row) != KEYS:
            raise BugDoesNotFit(
                f"{file.name}: a bug has the keys {sorted(row)}; they must be {sorted(KEYS)}."
            )
    return [Bug(area=file.stem, **{**row, "tests": tuple(row["tests"])}) for row in rows]


def all_bugs(folder: Path = AREAS) -> list[Bug]:
    """Every planted bug, by area."""
    return [bug for file in sorted(folder.glob("*.toml")) for bug in area_of(file)]
