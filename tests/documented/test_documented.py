"""The commands of README and docs are executed as typed, page by page, or the page says why not."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from itertools import groupby
from pathlib import Path

import pytest

from tests.documented.environment import make_environment
from tests.documented.pages import PAGES, ROOT, Command, commands
from tests.documented.runner import run
from tests.documented.scene import make_models, set_scene
from tests.gpu.card_shares import card_share

WITH_COMMANDS = [page for page in PAGES if commands(page)]
LIMIT_S = 3600
"""Of a page: the README has a whole ladder."""


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A fresh environment, and what the scenes are made of: one for all workers, so that they share what they prepare."""
    here = tmp_path_factory.getbasetemp()
    folder = (here.parent if "PYTEST_XDIST_WORKER" in os.environ else here) / "fresh"
    told = folder.with_suffix(".json")
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not told.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            variables = make_environment(folder)
            make_models(folder, variables)
            told.write_text(json.dumps(variables))
    return folder, json.loads(told.read_text())


def _of(page: Path, *, gpu: bool) -> list[Command]:
    return [one for one in commands(page) if not one.has("not") and one.has("gpu") == gpu]


def _gpu_blocks() -> list[object]:
    """A block is what someone types in one go, and stands for itself: a page of them is too long for one worker."""
    return [
        pytest.param(list(block), id=f"{_name(page)}-{number}")
        for page in WITH_COMMANDS
        for number, block in groupby(_of(page, gpu=True), key=lambda one: one.block)
    ]


def _execute(chosen: list[Command], made: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    folder, variables = made
    set_scene(tmp_path, folder, chosen)
    results = [run(command, tmp_path, variables) for command in chosen]
    failed = [f"{one.command.to_run}: {one.problem}\n{one.output[-2000:]}" for one in results if one.problem]
    if failed:  # whole: an assertion on the list would cut what the commands said
        pytest.fail("\n\n".join(failed), pytrace=False)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("page", [page for page in WITH_COMMANDS if _of(page, gpu=False)], ids=_name)
def test_every_command_of_a_page_runs_as_typed(
    page: Path, made: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    _execute(_of(page, gpu=False), made, tmp_path)


@pytest.mark.gpu
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("block", _gpu_blocks())
def test_every_command_that_needs_a_gpu_runs_there(
    block: list[Command], made: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    with card_share():
        _execute(block, made, tmp_path)


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=_name)
def test_what_is_not_run_has_a_reason(page: Path) -> None:
    assert [one.line for one in commands(page) if one.has("not") and len(one.reason.split()) < 2 and one.reason != "likewise"] == []  # fmt: skip


def test_most_commands_are_run_and_a_command_without_a_mark_is() -> None:
    everything = [one for page in PAGES for one in commands(page)]
    run_here = [one for one in everything if not one.has("not")]
    assert len(run_here) > len(everything) / 2
    assert all(one in run_here for one in everything if one.mark is None)


def test_a_command_that_fails_is_seen(tmp_path: Path) -> None:
    variables = dict(os.environ)
    page = ROOT / "README.md"
    for line in ("exit 3", "echo 'Traceback (most recent call last)'"):
        assert run(Command(page, line, None), tmp_path, variables).problem is not None
    assert run(Command(page, "cat", None), tmp_path, variables).output == "What is a list?\n"


def test_a_mark_for_a_command_that_is_not_there_and_an_unknown_kind_are_errors(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- run:\nnot | rush gone | a reason\n-->\n```sh\nrush train tiny\n```\n")
    with pytest.raises(AssertionError, match="rush gone"):
        commands(page)
    page.write_text("<!-- run:\nnever | rush train\n-->\n```sh\nrush train tiny\n```\n")
    with pytest.raises(AssertionError, match="no kind of mark"):
        commands(page)
    page.write_text("```sh\nrush train \\\n  tiny   # a comment\n\n# alone\n```\n")
    assert [one.line for one in commands(page)] == ["rush train tiny"]
