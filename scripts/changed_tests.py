"""Which test files a change concerns, for `make test-changed`.

A changed test file; the tests that import a changed module or helper, directly; and the test that mirrors it
(`rush/plan/memory.py` → `tests/plan/test_*memory*.py`). What reaches a change through other modules is left to `make test`.

python scripts/changed_tests.py [BASE]      files changed since BASE (HEAD), staged, unstaged and untracked
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def changed_files(base: str) -> set[Path]:
    """Paths in the repository that differ from `base`, or are not in it."""
    commands = (["git", "diff", "--name-only", base], ["git", "ls-files", "--others", "--exclude-standard"])
    said = [
        subprocess.run(one, cwd=ROOT, capture_output=True, text=True, check=True).stdout for one in commands
    ]
    return {Path(line) for text in said for line in text.splitlines()}


def module_of(path: Path) -> str:
    """`rush/plan/__init__.py` → `rush.plan`."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


@cache
def imported(file: Path) -> set[str]:
    """Every module that a file imports, and every name in one."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def concerned(changed: set[Path], tests: list[Path], root: Path = ROOT) -> list[Path]:
    """The test files that these changes concern."""
    sources = [path for path in changed if path.suffix == ".py"]
    modules = {module_of(path) for path in sources}
    mirrors = {
        (path.parts[1], path.stem) for path in sources if path.parts[0] == "rush" and len(path.parts) > 2
    }
    found = []
    for test in tests:
        mirrored = any(test.parts[1] == room and stem in test.stem for room, stem in mirrors)
        if test in changed or mirrored or modules & imported(root / test):
            found.append(test)
    return found


def main() -> None:
    tests = sorted(path.relative_to(ROOT) for path in (ROOT / "tests").glob("**/test_*.py"))
    found = concerned(changed_files(sys.argv[1] if len(sys.argv) > 1 else "HEAD"), tests)
    sys.stdout.write("".join(f"{path}\n" for path in found))


if __name__ == "__main__":
    main()
