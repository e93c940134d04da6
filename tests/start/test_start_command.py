"""`rush start` as a command; what it writes is planned, overfitted and trained unchanged."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import rush
from rush.cli import main
from rush.evaluate.overfit import overfit_recipe
from rush.recipe_io import load_recipe
from tests.start.small_data import chat, instructions, preferences, small_model, texts, write_rows

DATA = {"chat": chat(40), "instructions": instructions(40), "preferences": preferences(24), "text": texts(24)}


def run(*words: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rush", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture
def told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command in this process: its exit code, what it prints and what it complains about."""

    def tell(*words: str) -> tuple[int, str, str]:
        monkeypatch.chdir(folder)
        capsys.readouterr()
        try:
            main(list(words))
            code = 0
        except SystemExit as left:
            code = int(left.code or 0)
        return code, *capsys.readouterr()

    return tell


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("start")
    small_model(found / "model")
    for name, rows in DATA.items():
        write_rows(found / f"{name}.jsonl", rows)
    return found


@pytest.mark.slow
def test_a_model_and_data_become_a_run_with_two_commands(
    folder: Path, told: Callable[..., tuple[int, str, str]]
) -> None:
    started = run("start", "model", "--data", "chat.jsonl", "instructions.jsonl", "--device", "cpu", "schedule.epochs=1",
                  "--price", "3", "--out", "chat.toml", folder=folder)  # fmt: skip
    assert started.returncode == 0, started.stderr
    for line in (
        "2 files, 80 rows (40 chat, 40 instruction), 0 duplicates, 0 broken",
        "objective.kind = sft: ",
        "schedule.epochs = 1: given",
        "fits (±10%)",
        ", cost 0.00",
        "  rush overfit chat.toml\n  rush tune chat.toml\n  rush train chat.toml\n",
    ):
        assert line in started.stdout
    code, said, complaint = told(
        "start", "model", "--data", "chat.jsonl", "--device", "cpu", "--out", "chat.toml"
    )
    assert (code, said) == (2, "")
    assert "chat.toml exists; give another file with --out, or overwrite it with --force." in complaint
    trained = run("train", "chat.toml", "--out", "run", folder=folder)
    assert trained.returncode == 0, trained.stderr
    assert "1 passes over the data" in trained.stdout or "1 pass over the data" in trained.stdout


@pytest.mark.parametrize("name", ["chat", "preferences", "text"])
def test_what_was_written_trains_and_learns(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(folder)
    file = tmp_path / "recipe.toml"
    made = rush.start_recipe("model", f"{name}.jsonl", device="cpu", out=file)
    assert rush.plan_recipe(file, machine="cpu").fits
    ended = rush.train(file, out=tmp_path / "run")
    planned = made.record["plan"]["steps"]
    # A tenth of so few rows is held out by a hash of each: two to eight of forty.
    assert ended.summary.steps == pytest.approx(planned, rel=0.25, abs=3)
    losses = [row["loss"] for row in ended.rows]
    assert sum(losses[-3:]) < sum(losses[:3])
    assert ended.summary.val_loss is not None
    assert (ended.folder / "samples.jsonl").is_file()


def test_what_was_written_can_overfit_a_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(folder)
    file = tmp_path / "recipe.toml"
    rush.start_recipe("model", "chat.jsonl", device="cpu", out=file)
    verdict = overfit_recipe(load_recipe(str(file)), 300, lambda text: None)
    assert verdict.can_learn, verdict.reason


def test_the_record_is_one_json_value_and_nothing_is_written_on_refusal(
    folder: Path, told: Callable[..., tuple[int, str, str]]
) -> None:
    words = ("--data", "text.jsonl", "--memory", "24", "--json", "--out", "text.toml")
    code, said, complaint = told("start", "model", *words)
    assert code == 0, complaint
    record = json.loads(said)
    assert (record["objective"], record["format"]) == ("lm", 1)
    assert {"key", "value", "why", "given"} == set(record["decisions"][0])
    code, _, complaint = told(
        "start", "model", "--data", "chat.jsonl", "preferences.jsonl", "--out", "no.toml"
    )
    assert code == 3
    assert "one objective" in complaint
    assert not (folder / "no.toml").exists()
