"""Plant one bug after another in a copy of the tree, and run the tests that promise to catch it.

Importing torch, transformers and pytest takes longer than most of these tests. So this process imports them once, never
`rush`, and forks a child for every bug. The child imports `rush` and `tests` from a copy of the tree in which the bug
lies, and so does whatever it starts (PYTHONPATH).

Caught is a bug that makes a test fail. A bug that breaks the collection of tests proves nothing, and is told as broken.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.planted.bug import ROOT, Bug

PRELOADED = (
    "torch.distributed.tensor", "torch.nn.attention.flex_attention", "numpy.ma", "pydantic", "tokenizers", "safetensors.torch",
    "transformers", "typer", "rich.table", "hypothesis", "psutil", "jinja2",
)  # fmt: skip
TEST_S, CHILD_S = 300, 900
OPTIONS = (
    "-x", "-q", "-p", "no:cacheprovider", "--timeout", str(TEST_S), "--tb", "short",
    "-W", "ignore::pytest.PytestAssertRewriteWarning",  # plug-ins that were imported before the fork
)  # fmt: skip
PASSED, FAILED, NO_TESTS = 0, 1, 5
_tree = Path()
"""The copy that belongs to this worker."""


@dataclass(frozen=True)
class Outcome:
    """What the tests said about a bug."""

    bug: Bug
    verdict: str
    """caught, missed or broken"""
    by: str
    """The test that failed, or what went wrong."""
    seconds: float


@dataclass(frozen=True)
class Said:
    """What one run of pytest came to."""

    code: int
    failed: list[str]
    log: str


def warm_up() -> None:
    """Import what every child needs, with the settings of tests/conftest.py, which come too late in a child."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in (*PRELOADED, *(("triton.language",) if find_spec("triton") else ())):
        importlib.import_module(name)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if any(name == "rush" or name.startswith("rush.") for name in sys.modules):
        raise RuntimeError("rush was imported before a bug was planted: a child would test today's code.")


def copy_tree(root: Path, to: Path) -> Path:
    """Everything git knows of, and what it has not been told yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)
    return to


@contextmanager
def planted(bug: Bug, tree: Path) -> Iterator[None]:
    """The tree with the bug; afterwards without. Both get a new time, so that no bytecode is taken for the other's."""
    path = tree / bug.file
    source = path.read_text(encoding="utf-8")
    write_anew(path, bug.planted_in(source))
    try:
        yield
    finally:
        write_anew(path, source)


def write_anew(path: Path, text: str) -> None:
    later = path.stat().st_mtime + 2
    path.write_text(text, encoding="utf-8")
    os.utime(path, (later, later))


class Failures:
    """A plug-in of pytest that notes which tests failed."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


def run_tests(tests: Sequence[str], tree: Path) -> Said:
    """pytest in a forked child that imports from `tree`; ended with all it started when it takes too long."""
    told, log = tree.parent / f"{tree.name}.json", tree.parent / f"{tree.name}.log"
    told.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _be_pytest(tests, tree, told, log)
    code = _wait(child)
    text = log.read_text(encoding="utf-8", errors="replace")
    if code is None or not told.exists():
        return Said(
            FAILED if code is None else code, ["(ran out of time)" if code is None else "(died)"], text
        )
    return Said(**json.loads(told.read_text(encoding="utf-8")), log=text)


def _be_pytest(tests: Sequence[str], tree: Path, told: Path, log: Path) -> None:
    """The child. It never returns."""
    code = 70
    try:
        os.setsid()
        with log.open("wb") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        sys.path[:] = [str(tree), *(one for one in sys.path if Path(one or ".").resolve() != ROOT)]
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "scripts")]:
            del sys.modules[name]
        sys.path_importer_cache.clear()
        importlib.invalidate_caches()
        failures = Failures()
        code = int(pytest.main([*OPTIONS, *tests], plugins=[failures]))
        origin = getattr(sys.modules.get("rush"), "__file__", None)
        if origin and not Path(origin).is_relative_to(tree):
            code = 71
        told.write_text(json.dumps({"code": code, "failed": failures.failed}), encoding="utf-8")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int) -> int | None:
    """Its exit code; None if it had to be ended."""
    end = time.monotonic() + CHILD_S
    done = 0
    while not done and time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if not done:
            time.sleep(0.02)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it left behind
    if done:
        return os.waitstatus_to_exitcode(status)
    os.waitpid(child, 0)
    return None


def outcome_of(bug: Bug, said: Said, seconds: float) -> Outcome:
    if said.code == FAILED and said.failed:
        return Outcome(bug, "caught", said.failed[0], seconds)
    if said.code in (PASSED, NO_TESTS):
        why = "every test passed" if said.code == PASSED else "no test was run"
        return Outcome(bug, "missed", why, seconds)
    return Outcome(bug, "broken", f"pytest ended with {said.code}: {said.log[-2000:]}", seconds)


def try_bug(bug: Bug, tree: Path, more: Sequence[str] = ()) -> Outcome:
    """Plant, test, restore. `more` are further test files, for a bug that its own tests miss."""
    start = time.monotonic()
    with planted(bug, tree):
        found = outcome_of(bug, run_tests(bug.tests, tree), time.monotonic() - start)
        if found.verdict == "missed" and more:
            found = outcome_of(bug, run_tests(more, tree), time.monotonic() - start)
    return found


class Bench:
    """Workers with a copy of the tree each; every one of them forks its children from a single thread."""

    def __init__(self, jobs: int, root: Path = ROOT) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="planted-")
        self._pool = ProcessPoolExecutor(
            jobs, multiprocessing.get_context("fork"), _take_a_tree, (root, Path(self._folder.name))
        )

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._folder.cleanup()

    def try_all(self, bugs: Sequence[Bug], more: Callable[[Bug], Sequence[str]]) -> Iterator[Outcome]:
        """What became of each bug, as they are done."""
        asked = [self._pool.submit(_try_bug_here, bug, more(bug)) for bug in bugs]
        return (done.result() for done in as_completed(asked))

    def red_without_bugs(
        self, bugs: Sequence[Bug], tell: Callable[[str], None] = lambda text: None
    ) -> list[str]:
        """Tests of these bugs that fail on the tree as it is, or are not there: they catch nothing."""
        files: dict[str, set[str]] = {}
        for test in {test for bug in bugs for test in bug.tests}:
            files.setdefault(test.partition("::")[0], set()).add(test)
        asked = {self._pool.submit(_test_here, sorted(tests)): file for file, tests in sorted(files.items())}
        red = []
        for done in as_completed(asked):
            said, file = done.result(), asked[done]
            # Where all are slow, none is run: then the bug is missed.
            green = said.code in (PASSED, NO_TESTS)
            tell(f"{'green' if green else 'red':7} {file}")
            if not green:
                why = ", ".join(said.failed) or file
                red.append(f"{why} (pytest ended with {said.code})\n{said.log[-2000:]}")
        return red


def _take_a_tree(root: Path, folder: Path) -> None:
    global _tree
    _tree = copy_tree(root, folder / f"tree-{os.getpid()}")


def _try_bug_here(bug: Bug, more: Sequence[str]) -> Outcome:
    return try_bug(bug, _tree, more)


def _test_here(tests: Sequence[str]) -> Said:
    return run_tests(tests, _tree)
