"""The outcomes of planted bugs as a table for the terminal, and the bugs as docs/planted.md."""

from __future__ import annotations

from collections.abc import Sequence

from tests.planted.bug import Bug
from tests.planted.run import Outcome

HEAD = """# Planted bugs

`make test-planted` puts {count} bugs back into a copy of the tree, one at a time, and runs the tests that promise to
catch each of them. It ends with an error below {least:.0%} caught. The bugs are data, an area per file in
`tests/planted/bugs/`: a few lines as they are, the same lines with a mistake, and one to three tests, none of them
slow. `python -m tests.planted --only NAME` tries one of them, `--area NAME` an area; with `--all-tests` a bug that its
own tests miss is tried on all tests that concern its file.

A bug that is missed asks for a test. A patch that does not fit today's code any more asks to be adapted:
`tests/planted/test_planted.py` says so in `make test`. The tables below are written by
`python -m tests.planted --page docs/planted.md`.
"""


def by_area(found: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    areas: dict[str, list[Outcome]] = {}
    for outcome in sorted(found, key=lambda one: (one.bug.area, one.bug.name)):
        areas.setdefault(outcome.bug.area, []).append(outcome)
    return areas


def count(found: Sequence[Outcome], verdict: str) -> int:
    return sum(outcome.verdict == verdict for outcome in found)


def table(found: Sequence[Outcome]) -> str:
    """Planted, caught and missed by area, then every bug that was not caught, and the share."""
    lines = [f"{'area':<16}{'planted':>8}{'caught':>8}{'missed':>8}"]
    for area, outcomes in by_area(found).items():
        missed = len(outcomes) - count(outcomes, "caught")
        lines.append(f"{area:<16}{len(outcomes):>8}{count(outcomes, 'caught'):>8}{missed:>8}")
    lines += [
        f"{one.verdict}: {one.bug.area}/{one.bug.name}: {one.by}" for one in found if one.verdict != "caught"
    ]
    caught = count(found, "caught")
    lines.append(f"{caught} of {len(found)} planted bugs caught: {caught / len(found):.1%}")
    return "\n".join(lines)


def page(bugs: Sequence[Bug], least: float) -> str:
    """docs/planted.md."""
    lines = [HEAD.format(count=len(bugs), least=least)]
    for area in sorted({bug.area for bug in bugs}):
        lines += [f"\n## {area}\n", "| bug | in | caught by |", "| --- | --- | --- |"]
        lines += [
            f"| {bug.what} | `{bug.file}` | {' and '.join(map(_named, bug.tests))} |"
            for bug in bugs
            if bug.area == area
        ]
    return "\n".join(lines) + "\n"


def _named(test: str) -> str:
    file, _, name = test.partition("::")
    return f"`{file}`" + (f" `{name.partition('[')[0]}`" if name else "")
