"""Trackers: what a run logs is found again by the tracker's own library; none of them can stop or slow down a run."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rush.errors import MachineError
from rush.recipe import TRACKERS, Recipe
from rush.recipe_io import load_recipe
from rush.records.run_folder import RunFolder
from rush.training.loop import train_recipe
from rush.training.trackers import Trackers, check_trackers, feed, open_trackers, where_to_look
from rush.training.trackers.contract import Ended
from rush.training.view import View
from tests.training.small_runs import small_recipe, write_corpus
from tests.training.tracker_readers import READERS, Found

SECRETS = {
    "WANDB_API_KEY": "5ec2e7" + "a" * 34,
    "HF_TOKEN": "hf_secret_456",
    "MLFLOW_TRACKING_PASSWORD": "mlf-789",
}


@pytest.fixture(autouse=True)
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tracker's store in this test's folder, nothing sent, and secrets in the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    for module in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, module)  # its folder is read when it is imported
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))


@pytest.fixture(params=TRACKERS)
def tracker(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    pytest.importorskip(name, reason=f"{name} is not installed: make test-trackers brings it")
    return name


def recipe_for(folder: Path, tracker: str, **run: Any) -> Recipe:
    file = folder / "small.toml"
    changes = {
        "trackers": [tracker] if tracker else [],
        "save_every": 3,
        "sample_every": 3,
        "validate_every": 0,
    }
    steps = {"steps": 6, "warmup": 1}
    file.write_text(small_recipe(write_corpus(folder / "corpus"), schedule=steps, run={**changes, **run}))
    text = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("tensorboard"))
    file.write_text(text)
    return load_recipe(str(file))


def logged(folder: Path, rows: Mapping[int, float], resumed: bool, ended: Any, entry: str) -> None:
    recipe = load_recipe("tiny", [f'run.trackers=["{entry}"]', "run.seed=4711"])
    with open_trackers(recipe, RunFolder(folder), min(rows), resumed=resumed, note=pytest.fail) as trackers:
        for step, loss in rows.items():
            trackers.scalars(step, {"loss": loss, "lr": 1e-3})
        trackers.sample(max(rows), f"def f():\n    <b>&{max(rows)}\n")
        if isinstance(ended, Exception):
            raise ended
        trackers.ended = ended


def test_scalars_samples_recipe_resume_and_end_are_found_by_the_trackers_own_library(
    tmp_path: Path, tracker: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    entry = tracker if tracker == "tensorboard" else f"{tracker}:my-project"
    read: Callable[[Path, str], Found] = READERS[tracker]
    logged(folder, {1: 5.5, 2: 4.5, 3: 3.5}, False, "interrupted", entry)
    first = read(folder, "my-project")
    assert (first.runs, first.rows) == (1, [(1, 5.5), (2, 4.5), (3, 3.5)])
    assert first.samples == {3: "def f():\n    <b>&3\n"}
    assert "4711" in first.config
    assert first.ended[-1] == "interrupted"
    with pytest.raises(OSError, match="disk of glass"):
        logged(folder, {4: 2.5, 5: 1.5}, True, OSError("disk of glass"), entry)
    second = read(folder, "my-project")
    assert (second.runs, second.rows) == (1, [*first.rows, (4, 2.5), (5, 1.5)])
    assert second.samples == {**first.samples, 5: "def f():\n    <b>&5\n"}
    assert second.ended[-1] == "failed: OSError: disk of glass"
    logged(folder, {6: 0.5}, True, "finished", entry)
    assert read(folder, "my-project").ended[-1] == "finished"
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not [secret for secret in SECRETS.values() for content in written if secret.encode() in content]


def test_a_new_run_in_another_folder_of_the_same_name_is_another_run(tmp_path: Path, tracker: str) -> None:
    if tracker == "tensorboard":
        pytest.skip("its runs are folders")
    ids = []
    for parent in ("a", "b"):
        folder = tmp_path / parent / "run"
        folder.mkdir(parents=True)
        logged(folder, {1: 1.0}, False, "finished", f"{tracker}:p")
        ids.append(RunFolder(folder).trackers.read_text())
    assert ids[0] != ids[1]


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_not_installed_is_one_sentence_with_the_command_before_the_first_step(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda one, *more: None if one == name else find(one, *more)
    )
    with pytest.raises(
        MachineError, match=rf"pip install 'optimization-rush\[{name}\]'.*run.trackers-={name}"
    ) as caught:
        train_recipe(recipe_for(tmp_path, name), tmp_path / "run")
    assert str(caught.value).count("\n") == 0
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_folder_with_the_name_of_a_tracker_is_not_taken_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B leaves folders of its name, which Python takes for a package without a file."""
    folder = importlib.machinery.ModuleSpec("wandb", None, is_package=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: folder)
    with pytest.raises(MachineError, match="wandb, which is not installed"):
        check_trackers(load_recipe("tiny", ["run.trackers=['wandb']"]))


def test_wandb_without_a_login_does_not_ask_in_the_middle_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_wandb = importlib.import_module("rush.training.trackers.to_wandb")
    to_wandb.check()  # offline
    monkeypatch.delenv("WANDB_MODE")
    to_wandb.check()  # with a key
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    with pytest.raises(
        MachineError, match="no login was found; run `wandb login`, or set WANDB_MODE=offline"
    ):
        to_wandb.check()


class Notes(View):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


class Broken:
    id = "broken"

    def __init__(self, at: int, wait: threading.Event | None = None) -> None:
        self.at, self.wait, self.rows = at, wait, 0

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.rows += 1
        if step >= self.at:
            if self.wait is not None:
                self.wait.wait()
            raise ConnectionError("the server\nis gone")

    def sample(self, step: int, text: str) -> None: ...
    def end(self, ended: Ended) -> None: ...


def test_a_tracker_that_fails_in_the_middle_of_a_run_is_one_warning_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("rush.training.trackers.to_tensorboard")
    broken, view = Broken(2), Notes()
    monkeypatch.setattr(module, "open_tracker", lambda run: broken)
    summary = train_recipe(recipe_for(tmp_path, "tensorboard"), tmp_path / "run", view=view)
    assert summary.step == 6
    told = [note for note in view.notes if "tracker" in note]
    assert told == [
        "The tracker tensorboard failed with ConnectionError: the server. It gets nothing more; the run continues, and "
        "metrics.jsonl has every row."
    ]
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 6
    assert broken.rows == 2


def test_a_tracker_that_hangs_does_not_hang_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "END_S", 0.1)
    monkeypatch.setattr(feed, "MOST_WAITING", 5)
    notes: list[str] = []
    release = threading.Event()
    began = time.monotonic()
    for rows, said in ((3, "did not take the last"), (50, "is 5 rows behind")):
        with Trackers([("slow", Broken(1, release))], notes.append) as trackers:
            for step in range(1, rows):
                trackers.scalars(step, {"loss": 1.0})
        assert said in notes.pop()
        assert not notes
    assert time.monotonic() - began < 5
    release.set()


def test_a_store_that_cannot_be_opened_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(run: object) -> None:
        raise ValueError("no such store\nand more")

    monkeypatch.setattr(
        importlib.import_module("rush.training.trackers.to_tensorboard"), "open_tracker", refuse
    )
    with pytest.raises(
        MachineError, match=r"could not be opened \(ValueError: no such store\). Fix that, or leave it"
    ):
        train_recipe(recipe_for(tmp_path, "tensorboard"), tmp_path / "run")


def test_a_run_and_its_resume_are_one_run_of_the_tracker(tmp_path: Path, tracker: str) -> None:
    """The whole trainer: three steps, a failure after the checkpoint, a resume to the end."""
    recipe, folder = recipe_for(tmp_path, tracker), tmp_path / "run"

    class Stops(Notes):
        def row(self, row: Any) -> None:
            if row["step"] == 5:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_recipe(recipe, folder, view=Stops())
    read = READERS[tracker]
    assert read(folder, "rush").ended[-1] == "interrupted"
    train_recipe(None, folder, resume=True)
    found = read(folder, "rush")
    assert found.runs == 1
    assert found.ended[-1] == "finished"
    assert set(found.samples) == {3, 6}
    steps = [step for step, _ in found.rows]
    # A step that is trained again is logged again; TensorBoard replaces it.
    again = [1, 2, 3, 4, 5, 6] if tracker == "tensorboard" else [1, 2, 3, 4, 4, 5, 5, 6]
    assert sorted(steps) == again


def test_where_to_look_is_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = '["tensorboard", "wandb:my p", "mlflow", "trackio:my p"]'
    recipe = load_recipe("tiny", [f"run.trackers={names}"])
    assert where_to_look(recipe, Path("runs/a b")) == [
        "tensorboard --logdir 'runs/a b/tensorboard'",
        "wandb sync 'runs/a b/wandb'/offline-run-*",
        "mlflow ui",
        "trackio show --project 'my p'",
    ]
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:password@example.org")
    assert where_to_look(recipe, Path("x"))[1:3] == [
        "https://wandb.ai/home, project my p",
        "MLflow's server, experiment rush",
    ]
