"""Files that people share (run folders, ladders, exported models) name neither the host nor the user nor the home folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rush.files import shareable
from rush.records.lock import LOCK_NAME, FolderLock
from tests.training.small_runs import ROOT, small_recipe, write_corpus

HOST, USER = "planted-host", "plantina"
PRIVATE = {"failure.log"}
"""For the person who runs it, who decides whom to send it to."""
PATCH = f"""
import platform, socket
socket.gethostname = platform.node = lambda: {HOST!r}
"""


def leaks(folder: Path, *words: str) -> list[str]:
    """Files that hold one of these words, or are named after it."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in PRIVATE):
        content, name = path.read_bytes(), str(path.relative_to(folder))
        found += [f"{name}: {word}" for word in words if word.encode() in content or word in name]
    return found


class Home:
    """A person's home folder with a project in it, and `rush` run there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / f"home-of-{USER}"
        self.project = self.folder / "project"
        self.project.mkdir(parents=True)
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(PATCH)
        self.environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder / "site"), str(ROOT)]),
            "HOME": str(self.folder),
            "USER": USER,
            "LOGNAME": USER,
            # Python would put the bytecode of a technique beside it.
            "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        }
        self.environment.pop("RUSH_CACHE", None)
        corpus = write_corpus(self.project / "corpus").relative_to(self.project)
        run = {"save_every": 2, "validate_every": 2, "sample_every": 2, "tensorboard": True}
        text = small_recipe(corpus, schedule={"steps": 2, "warmup": 0}, run=run)
        (self.project / "small.toml").write_text(text)

    def rush(self, *words: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "rush", *words]
        done = subprocess.run(
            command, cwd=self.project, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    def leaks(self) -> list[str]:
        return leaks(self.project, HOST, USER, str(self.folder))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_a_ladder_a_search_and_an_exported_model_name_no_host_no_user_and_no_home(
    tmp_path: Path,
) -> None:
    home = Home(tmp_path)
    broken = (ROOT / "tests" / "cli" / "failing" / "in_backward.py").read_text()
    # What it raises names a file of this person's.
    planted = broken.replace('KeyError("planted in backward")', f'OSError("{home.folder}/secret is missing")')
    assert planted != broken
    (home.project / "in_backward.py").write_text(planted)
    rungs = 'rungs = ["fused_adamw", "in_backward"]\n'
    quick = "[measure]\nprocesses = 2\nwindows = 3\nwindow_ms = 20\n[parity]\nsteps = 4\n"
    (home.project / "ladder.toml").write_text(f'recipe = "small.toml"\n{rungs}{quick}')
    home.rush("train", "small.toml", "--out", "runs/small")
    home.rush("export", "runs/small", "--to", "exported")
    own = ("--technique", "in_backward.py")
    home.rush("ladder", "ladder.toml", "--out", "runs/ladder", *own)
    home.rush(
        "train",
        "small.toml",
        "techniques=['in_backward']",
        "schedule.steps=4",
        "--out",
        "runs/broken",
        *own,
        code=4,
    )
    home.rush("tune", "small.toml", "--budget", "20s", "--out", "runs/tuned")
    home.rush("compare", "runs/ladder", "runs/ladder", "--out", "compared.html")
    (home.project / "in_backward.py").unlink()
    written = {path.name for path in home.project.rglob("*") if path.is_file()}
    assert {"ladder.json", "tune.json", "machine.json", "report.html", "recipe.toml", "techniques.json", "failure.json",
            "config.json", "compared.html"} <= written  # fmt: skip
    assert home.leaks() == []


@pytest.mark.slow
def test_a_run_names_no_host_no_user_and_no_home(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.rush("train", "small.toml", "--out", "run")
    assert any((home.project / "run" / "tensorboard").iterdir())
    assert home.leaks() == []


def test_a_lock_names_its_holder_while_it_is_held_and_nobody_afterwards(tmp_path: Path) -> None:
    with FolderLock(tmp_path):
        assert str(os.getpid()) in (tmp_path / LOCK_NAME).read_text()
    assert (tmp_path / LOCK_NAME).read_text() == ""


def test_messages_are_recorded_without_the_home_and_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, here = tmp_path / "home", tmp_path / "home" / "project"
    here.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    said = f"no {here}/a.py and no {home}/b.py and no /etc/c"
    assert shareable(said) == f"no a.py and no ~{os.sep}b.py and no /etc/c"
    monkeypatch.chdir("/")
    assert shareable("no /etc/c") == "no /etc/c"
