"""An interrupted run of the tests goes on where it was, on exactly the same tree only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import os, pytest
def test_passes(): pass
@pytest.mark.parametrize("n", range(3))
def test_each(n): pass
def test_depends(): assert os.path.exists("mended")
"""
SETTINGS = "[tool.pytest.ini_options]\ntestpaths = ['inner']\naddopts = '--import-mode=importlib'\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A tree of its own with one test that fails."""
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "test_small.py").write_text(TESTS)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "passed_before.py").write_text((ROOT / "tests" / "passed_before.py").read_text())
    (tmp_path / "pyproject.toml").write_text(SETTINGS)
    (tmp_path / ".gitignore").write_text("mended\n__pycache__\n.pytest_cache\nkept.jsonl*\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def run(project: Path, *more: str) -> tuple[int, str]:
    words = ["-p", "tests.passed_before", "--passed", "kept.jsonl", "-p", "no:cacheprovider", *more]
    done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=project, capture_output=True, text=True, check=False, env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_a_run_goes_on_where_it_was_and_begins_anew_when_all_is_green(project: Path) -> None:
    code, said = run(project, "-p", "xdist", "-n", "2")
    assert code == 1, said
    assert "1 failed, 4 passed" in said
    assert not (project / "kept.jsonl.runs").exists()
    (project / "mended").touch()  # which git ignores: the tree is the same
    code, said = run(project, "-p", "xdist", "-n", "2")
    assert code == 0, said
    assert "4 tests passed on this tree before" in said
    assert "1 passed" in said
    assert not (project / "kept.jsonl").exists()
    (green,) = map(json.loads, (project / "kept.jsonl.runs").read_text().splitlines())
    assert green["tests"] == 5
    assert "5 passed" in run(project, "-p", "xdist", "-n", "2")[1], (
        "after a whole green run the next one begins anew"
    )
    trees = [json.loads(line)["tree"] for line in (project / "kept.jsonl.runs").read_text().splitlines()]
    assert trees == [green["tree"]] * 2, "twice in a row, on one tree"


def test_another_byte_of_the_tree_begins_anew_and_some_tests_alone_are_no_whole_run(project: Path) -> None:
    assert run(project, "inner/test_small.py::test_passes")[0] == 0
    assert run(project, "-k", "each")[0] == 0
    assert not (project / "kept.jsonl.runs").exists()
    assert "1 failed, 4 deselected" in run(project)[1]
    (project / "more.txt").write_text("x")
    assert "1 failed, 4 passed" in run(project)[1]
