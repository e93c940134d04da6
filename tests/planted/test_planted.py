"""The planted bugs fit today's code, and what tries them can tell a bug that is caught from one that is not.

Trying them all takes minutes: `make test-planted`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.planted.__main__ import AT_LEAST
from tests.planted.bug import ROOT, Bug, BugDoesNotFit, all_bugs
from tests.planted.page import page

BUGS = all_bugs()


@cache
def functions(file: str) -> dict[str, list[str]]:
    """The tests of a file with their decorators."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    marks = [
        ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    return {
        node.name: [*marks, *map(ast.unparse, node.decorator_list)]
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_there_are_more_than_a_hundred_with_names_of_their_own() -> None:
    assert len(BUGS) >= 100
    assert len({bug.name for bug in BUGS}) == len(BUGS)
    assert len({(bug.file, bug.new) for bug in BUGS}) == len(BUGS)
    assert len({bug.area for bug in BUGS}) >= 12


@pytest.mark.parametrize("area", sorted({bug.area for bug in BUGS}))
def test_the_bugs_of_an_area_fit_todays_code_once_and_their_tests_exist(area: str) -> None:
    for bug in BUGS:
        if bug.area == area:
            bug.planted_in(source(bug.file))
            assert bug.file.startswith("rush/"), bug.name
            assert not bug.what.endswith("."), bug.name
            assert 1 <= len(bug.tests) <= 3, bug.name
            for test in bug.tests:
                assert_quick(test)


def assert_quick(test: str) -> None:
    """The test is there and part of `make test`: marked slow neither by itself nor with its file. (One that is slow for some
    parameters is run with the others.)"""
    file, _, name = test.partition("::")
    known, function = functions(file), name.partition("[")[0]
    assert not name or function in known, f"{file} has no {function}"
    marks = {one: known[one] for one in ([function] if name else known)}
    slow = [one for one, found in marks.items() if {"pytest.mark.slow", "slow", "pytest.mark.gpu"} & {*found}]
    assert slow != list(marks), f"{test} is not part of make test"


@cache
def source(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


def test_the_page_of_bugs_is_current() -> None:
    wanted = page(BUGS, AT_LEAST)
    assert (ROOT / "docs" / "planted.md").read_text(encoding="utf-8") == wanted, "run `make docs`"


def bug_of(**changes: str) -> Bug:
    given = {
        "area": "a",
        "name": "b",
        "what": "c",
        "file": "rush/f.py",
        "old": "1 + 1",
        "new": "1 - 1",
        **changes,
    }
    return Bug(**given, tests=("tests/test_f.py",))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "source", "said"),
    [
        ({}, "x = 2\n", "occurs 0 times"),
        ({}, "x = 1 + 1\ny = 1 + 1\n", "occurs 2 times"),
        ({"new": "1 +"}, "x = 1 + 1\n", "is no Python"),
        ({"new": "1 + 1"}, "x = 1 + 1\n", "the same"),
    ],
)
def test_a_patch_that_does_not_fit_is_told(changes: dict[str, str], source: str, said: str) -> None:
    with pytest.raises(BugDoesNotFit, match=said):
        bug_of(**changes).planted_in(source)


TRY = """
from pathlib import Path
from tests.planted.bug import Bug
from tests.planted.run import Bench, copy_tree, planted

def bug(name, new, tests): return Bug("a", name, "what", "rush/f.py", "a + b", new, tests)
bugs = [
    bug("seen", "a - b", ("tests/test_f.py::test_sum",)),
    bug("unseen", "b + a", ("tests/test_f.py::test_sum",)),
    bug("slow", "a - b", ("tests/test_f.py::test_slowly",)),
    bug("no test", "a - b", ("tests/test_f.py::test_gone",)),
    bug("import", "a + b + c", ("tests/test_g.py",)),
]
with Bench(1, Path("tree")) as bench:
    print(*(f"{one.bug.name}: {one.verdict}" for one in bench.try_all(bugs, lambda bug: ())), sep="\\n")
    print("red:", [red.split(" ")[0] for red in bench.red_without_bugs(bugs[:3])], sep="")
print((Path("tree") / "rush" / "f.py").read_text())
"""


def test_caught_missed_and_broken_are_told_apart_and_the_tree_stays_as_it_is(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    files = {
        "rush/__init__.py": "",
        "rush/f.py": "def f(a, b):\n    return a + b\n",
        "tests/test_f.py": "import pytest\nfrom rush.f import f\n\n\ndef test_sum():\n    assert f(2, 1) == 3\n\n\n"
        "@pytest.mark.slow\ndef test_slowly():\n    assert f(2, 1) == 3\n",
        "tests/test_g.py": "from rush.f import f\nf(1, 1)\n\n\ndef test_it():\n    assert f\n",
        "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--import-mode=importlib -m \'not slow\'"\npythonpath = ["."]\n'
        'markers = ["slow: it"]\n',
    }
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    done = subprocess.run(
        [sys.executable, "-c", TRY], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = dict(line.split(": ") for line in done.stdout.splitlines()[:5])
    assert said == {
        "seen": "caught",
        "unseen": "missed",
        "slow": "missed",
        "no test": "broken",
        "import": "broken",
    }
    assert "red:[]" in done.stdout
    assert files["rush/f.py"] in done.stdout
