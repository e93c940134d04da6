"""Remembers which tests passed on exactly this tree, so that an interrupted `make test-all` resumes.

    python -m pytest -p tests.passed_before --passed FILE

A tree is every file that git tracks or would track, with the versions of Python and torch: a change of one byte begins anew.
What failed is run again. When every test of a whole run (no paths, no -k) has passed, FILE is removed and a line is added to
FILE.runs, so the next run begins anew: two lines with one digest are two green runs in a row, in however many pieces.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import time
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SNAPSHOT = "passed_before"
"""The key under which the workers receive the passed tests once: they must all collect the same tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--passed", type=Path, help="remember here which tests passed on this tree, and leave them out"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--passed"):
        inherited = getattr(config, "workerinput", {}).get(SNAPSHOT)
        config.pluginmanager.register(Passed(config, inherited), "passed-before")


class Passed:
    def __init__(self, config: pytest.Config, inherited: list[str] | None) -> None:
        self.config, self.file, self.is_worker = config, config.getoption("--passed"), inherited is not None
        self.began, self.took_s, self.outcomes = time.monotonic(), defaultdict(float), defaultdict(set)
        if self.is_worker:
            self.before = dict.fromkeys(inherited or [], 0.0)
        else:
            self.digest = tree_digest()
            self.before = passed_on(self.file, self.digest)
            if not self.before:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                self.file.write_text(json.dumps({"tree": self.digest}) + "\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[SNAPSHOT] = list(self.before)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        known = [item for item in items if item.nodeid in self.before]
        if known:
            self.config.hook.pytest_deselected(items=known)
            items[:] = [item for item in items if item.nodeid not in self.before]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.is_worker:
            return
        self.took_s[report.nodeid] += report.duration
        self.outcomes[report.nodeid].add(report.outcome)
        if report.when == "teardown" and "failed" not in self.outcomes[report.nodeid]:
            line = {"test": report.nodeid, "s": round(self.took_s[report.nodeid], 2)}
            with open(self.file, "a") as file:
                file.write(json.dumps(line) + "\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.before and not self.is_worker:
            told = f"{len(self.before):,} tests passed on this tree before ({sum(self.before.values()):,.0f} s) and were left out"
            terminalreporter.write_line(told)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        done = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED if self.before else pytest.ExitCode.OK)
        whole = (
            self.config.args_source is pytest.Config.ArgsSource.TESTPATHS and not self.config.option.keyword
        )
        if self.is_worker or not whole or exitstatus not in done:
            return
        session.exitstatus = pytest.ExitCode.OK
        passed = passed_on(self.file, self.digest)
        green = {"at": time.strftime("%FT%TZ", time.gmtime()), "tree": self.digest, "tests": len(passed),
                 "worker_s": round(sum(passed.values())), "last_piece_s": round(time.monotonic() - self.began)}  # fmt: skip
        with open(self.file.with_name(f"{self.file.name}.runs"), "a") as file:
            file.write(json.dumps(green) + "\n")
        self.file.unlink()


def tree_digest() -> str:
    """Of every file that git tracks or would track, and of what runs them."""
    asked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(asked, cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    digest = hashlib.sha256(f"{platform.python_version()} {version('torch')}".encode())
    for name in sorted(set(filter(None, names))):
        path = ROOT / name.decode()
        digest.update(name + b"\0" + (hashlib.sha256(path.read_bytes()).digest() if path.is_file() else b""))
    return digest.hexdigest()[:16]


def passed_on(file: Path, digest: str) -> dict[str, float]:
    """The tests that passed on this tree, with their seconds; none where the file is of another tree. A torn last line is left out."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    if not lines or json.loads(lines[0]) != {"tree": digest}:
        return {}
    return {line["test"]: line["s"] for line in map(json.loads, lines[1:])}
