"""`make test-planted`: how many planted bugs the tests catch, by area.

python -m tests.planted [--area AREA] [--only NAME] [--jobs 2] [--all-tests] [--no-check]
python -m tests.planted --page docs/planted.md
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.changed_tests import concerned
from tests.planted.bug import ROOT, Bug, BugDoesNotFit, all_bugs
from tests.planted.page import page, table
from tests.planted.run import Bench, Outcome, warm_up

AT_LEAST = 0.97


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def chosen(areas: Sequence[str], names: Sequence[str]) -> list[Bug]:
    known = all_bugs()
    bugs = [bug for bug in known if (not areas or bug.area in areas) and (not names or bug.name in names)]
    unknown = ({*areas} - {bug.area for bug in known}) | ({*names} - {bug.name for bug in known})
    if unknown or not bugs:
        sys.exit(
            f"No planted bug for: {', '.join(sorted(unknown)) or 'this choice'}. Areas are the files in tests/planted/bugs."
        )
    for bug in bugs:
        bug.planted_in((ROOT / bug.file).read_text(encoding="utf-8"))
    return bugs


def tests_of(bug: Bug) -> list[str]:
    """The test files that `make test-changed` would run."""
    every = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").glob("**/test_*.py"))
    return [str(path) for path in concerned({Path(bug.file)}, every) if "planted" not in path.parts]


def told(outcome: Outcome) -> str:
    return (
        f"{outcome.verdict:7} {outcome.seconds:5.1f} s  {outcome.bug.area}/{outcome.bug.name}  {outcome.by}"
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("--area", action="append", default=[], help="only this area; may be repeated")
    parser.add_argument("--only", action="append", default=[], help="only this bug; may be repeated")
    parser.add_argument("--jobs", type=int, default=2, help="bugs side by side")
    parser.add_argument(
        "--all-tests", action="store_true", help="try a missed bug on all tests that concern its file"
    )
    parser.add_argument("--no-check", action="store_true", help="do not run the tests without the bugs first")
    parser.add_argument("--page", type=Path, help="write the tables of bugs to this page, and try none")
    options = parser.parse_args(words)
    try:
        bugs = chosen(options.area, options.only)
    except BugDoesNotFit as error:
        sys.exit(str(error))
    if options.page:
        options.page.write_text(page(bugs, AT_LEAST), encoding="utf-8")
        return 0
    start = time.monotonic()
    warm_up()
    with Bench(options.jobs) as bench:
        if not options.no_check:
            if red := bench.red_without_bugs(bugs, say):
                say("Red without any bug, so these catch nothing:\n" + "\n".join(red))
                return 1
            say(f"The tests of {len(bugs)} bugs are green without them ({time.monotonic() - start:.0f} s).")
        found = []
        for outcome in bench.try_all(bugs, tests_of if options.all_tests else lambda bug: ()):
            say(told(outcome))
            found.append(outcome)
    say("\n" + table(found) + f"\n{time.monotonic() - start:.0f} s.")
    caught = sum(outcome.verdict == "caught" for outcome in found)
    broken = any(outcome.verdict == "broken" for outcome in found)
    return 1 if broken or caught < AT_LEAST * len(found) else 0


if __name__ == "__main__":
    sys.exit(main())
