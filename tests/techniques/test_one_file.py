"""One file adds a technique: whatever walks over all techniques takes it in, and no other file has to change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rush.cli import main
from rush.errors import RecipeError
from rush.hardware import probe
from rush.techniques import check, conflict_reason, registry
from rush.techniques.api.own_files import added
from tests.techniques import test_registry as demands
from tests.techniques.tiny_runs import ROOT, recipe_of

NAME = "foreach_adamw"
FILE = ROOT / "tests" / "plugin_example" / "rush_example" / f"{NAME}.py"
WALKS = (
    "techniques/test_registry.py", "techniques/test_check.py", "techniques/test_effects.py", "techniques/test_determinism.py",
    "plan/test_properties.py", "plan/test_plan_memory.py", "tune/test_moves.py", "tune/test_options.py",
    "lab/test_ladder_file.py", "lives/test_covering.py", "parallel/test_compose.py", "cli/test_probe_command.py",
    "test_docs.py", "test_public_names.py", "test_recipe.py",
)  # fmt: skip
"""Tests that walk over all techniques, their pages, ladders or pairs."""
OF_OTHERS = (
    "test_it_ or test_its_evidence or test_every_requirement or test_conflicts_are_known or every_field"
)
"""Tests with a case for each technique: only the new one's is run."""


@pytest.fixture
def known() -> Iterator[None]:
    with added([FILE]):
        yield


def test_a_conflict_counts_although_the_other_file_does_not_know_it(known: None) -> None:
    other = (ROOT / "rush" / "techniques" / "optimizer" / "fused_adamw.py").read_text()
    assert NAME not in other
    assert NAME in registry()["fused_adamw"].conflicts
    assert conflict_reason(registry()["fused_adamw"], registry()[NAME]).startswith("both replace")
    for pair in ((NAME, "fused_adamw"), ("fused_adamw", NAME)):
        with pytest.raises(RecipeError, match="cannot be combined: both replace the plain update"):
            check(recipe_of(*pair), probe("cpu"))


def test_what_is_demanded_of_every_technique_holds_for_one_from_a_file(known: None) -> None:
    demands.test_every_field_is_filled_in(NAME)
    demands.test_conflicts_are_known_and_mutual(NAME)
    demands.test_conflicts_are_known_and_mutual("fused_adamw")


def test_afterwards_nobody_knows_it() -> None:
    with added([FILE]):
        assert NAME in registry()
    assert NAME not in registry()
    assert not any(NAME in technique.conflicts for technique in registry().values())


@pytest.mark.parametrize("command", ["plan", "probe"])
def test_plan_and_probe_take_a_file(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from rush.cli import probe as probe_command
    from rush.hardware.ceilings import Ceilings

    monkeypatch.setattr(probe_command, "_measure", lambda machine, *rest: Ceilings.__new__(Ceilings))
    monkeypatch.setattr(probe_command, "_show_rates", lambda *rest: None)
    words = [command, "tiny", f"techniques=['{NAME}']", "run.device=cpu"]
    words += ["--machine", "cpu"] if command == "plan" else []
    with pytest.raises(SystemExit) as refused:
        main(words)
    assert refused.value.code == 2
    assert "give its file with --technique FILE (the file is executed)" in " ".join(
        capsys.readouterr().err.split()
    )
    with pytest.raises(SystemExit) as done:
        main([*words, "--technique", str(FILE), *(["--json"] if command == "plan" else [])])
    told = capsys.readouterr()
    assert done.value.code == 0, told.err
    if command == "plan":
        assert json.loads(told.out)["fits"]
    else:
        assert NAME in told.out


def test_a_job_for_slurm_takes_a_file_and_pods_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "tiny", f"techniques=['{NAME}']", "layout.ddp=2", "--gpus-per-node", "2", "--out", "-"]
    with pytest.raises(SystemExit) as done:
        main([*words, "--slurm", "--technique", str(FILE)])
    told = capsys.readouterr()
    assert done.value.code == 0, told.err
    assert f"--technique {FILE}" in told.out
    with pytest.raises(SystemExit) as refused:
        main([*words, "--k8s", "--technique", str(FILE)])
    assert refused.value.code == 2
    assert "which the pods do not have" in " ".join(capsys.readouterr().err.split())


def test_the_example_in_contributing_is_the_file_that_is_tested() -> None:
    assert f"```python\n{FILE.read_text()}```" in (ROOT / "CONTRIBUTING.md").read_text()


COMMANDS = [
    ["train"],
    ["tune"],
    ["plan"],
    ["probe"],
    ["overfit"],
    ["ladder"],
    ["scale"],
    ["bench", "models"],
    ["launch"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_the_help_of_every_command_that_takes_a_file_warns_that_it_is_executed(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--technique" in text
    assert "Its code is executed: give only files you trust." in text


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_with_one_more_file_in_a_copy_of_the_tree_everything_that_walks_over_techniques_passes(
    tmp_path: Path,
) -> None:
    for name in ("rush", "tests", "docs", "scripts", "recipes", "ladders", "pipelines", "examples", "locks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*ROOT.glob("*.md"), ROOT / "pyproject.toml", ROOT / "Makefile"):
        shutil.copy(path, tmp_path)
    (tmp_path / "results").symlink_to(ROOT / "results")
    shutil.copy(FILE, tmp_path / "rush" / "techniques" / "optimizer")
    tests = [f"tests/{name}" for name in WALKS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "-m", "not slow",
         "-k", f"{NAME} or not ({OF_OTHERS})"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
