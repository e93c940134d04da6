"""The rules for opening a run folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from rush.errors import MachineError, RecipeError
from rush.files import write_atomic
from rush.records.run_folder import RunFolder, existing_run, new_run, resumed_run


def test_a_new_run_gets_a_fresh_locked_folder(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "first"
    with new_run(path) as folder:
        assert folder == RunFolder(path)
        assert path.is_dir()
        with pytest.raises(MachineError, match="in use"), resumed_or_new(path):
            pass


def resumed_or_new(path: Path):  # type: ignore[no-untyped-def]
    return resumed_run(path) if RunFolder(path).recipe.exists() else new_run(path)


@pytest.mark.parametrize("left", ["recipe.toml", "metrics.jsonl", "checkpoints/step-000001"])
def test_a_new_run_is_refused_where_one_was_started(tmp_path: Path, left: str) -> None:
    target = tmp_path / left
    if left.startswith("checkpoints"):
        target.mkdir(parents=True)
    else:
        target.touch()
    with pytest.raises(RecipeError, match="--resume") as caught, new_run(tmp_path):
        pass
    assert "--out" in str(caught.value)
    with pytest.raises(RecipeError), new_run(tmp_path):
        pass


def test_a_folder_with_other_things_in_it_is_refused_and_nothing_is_added(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with (
        pytest.raises(RecipeError, match=r"other files \(notes.txt\); choose a new or an empty folder"),
        new_run(tmp_path),
    ):
        pass
    assert [path.name for path in tmp_path.glob("[!.]*")] == ["notes.txt"]


def test_what_a_failed_start_left_behind_does_not_refuse_the_next(tmp_path: Path) -> None:
    (tmp_path / "failure.log").write_text("Traceback")
    (tmp_path / "failure.json").write_text("{}")
    with new_run(tmp_path) as folder:
        write_atomic(folder.recipe, "")


def test_resuming_where_no_run_is_is_refused_and_creates_nothing(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(RecipeError, match="holds no run"), resumed_run(path):
            pass
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RecipeError, match="holds no run"):
        existing_run(tmp_path)


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(RecipeError, match="is a file"), new_run(tmp_path / "x"):
        pass


def test_resuming_cleans_up_after_the_crash_but_looking_does_not(tmp_path: Path) -> None:
    with new_run(tmp_path) as folder:
        write_atomic(folder.recipe, "")
        folder.checkpoints.begin(3)
    litter = tmp_path / ".recipe.toml.77.deadbeef.tmp"
    litter.touch()
    existing_run(tmp_path)
    assert litter.exists()
    with resumed_run(tmp_path) as folder:
        assert not litter.exists()
        assert list(folder.checkpoints.folder.iterdir()) == []


def test_the_lock_is_free_after_an_error_inside(tmp_path: Path) -> None:
    with pytest.raises(KeyError), new_run(tmp_path):
        raise KeyError
    with new_run(tmp_path):
        pass
