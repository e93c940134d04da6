"""Whole preference runs through the loop: they start at log 2, move, write down what they see, and resume to the bit."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rush.errors import DataError
from rush.recipe_io import load_recipe
from rush.training.loop import train_recipe
from tests.fresh_cache import fresh_cache
from tests.training.small_preferences import preference_recipe, write_pairs
from tests.training.small_runs import checkpoint_files, rows

LOG_TWO = float(torch.tensor(math.log(2), dtype=torch.float32))


@pytest.fixture
def pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(tmp_path / "cache")))
    return write_pairs(tmp_path / "pairs.jsonl")


def start(folder: Path, pairs: Path, **sections: dict[str, Any]) -> Any:
    file = folder.with_suffix(".toml")
    file.write_text(preference_recipe(pairs, **sections))
    return load_recipe(str(file))


@pytest.mark.parametrize(
    ("reference", "techniques"),
    [
        ("cached", ["lora"]),
        pytest.param("cached", [], marks=pytest.mark.slow),
        pytest.param("live", [], marks=pytest.mark.slow),
        pytest.param("live", ["lora"], marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_stopped_and_resumed_is_the_run_that_was_not(
    tmp_path: Path, pairs: Path, reference: str, techniques: list[str]
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    recipe = start(
        whole, pairs, objective={"kind": "dpo", "reference": reference}, run={"keep": 6}
    ).model_copy(update={"techniques": techniques})
    train_recipe(recipe, whole)
    found = rows(whole)
    assert found[0]["loss"] == LOG_TWO
    assert found[0]["accuracy"] == 0.5
    assert {"reward_margin", "logp_chosen", "logp_rejected"} <= found[-1].keys()
    assert {"val_loss", "val_accuracy", "val_reward_margin"} <= found[-1].keys()
    assert found[-1]["val_reward_margin"] != found[-1]["reward_margin"]
    # The same run, killed after step 3: its later checkpoints and rows never came to be.
    shutil.copytree(whole, cut)
    for step in (4, 5, 6):
        shutil.rmtree(cut / "checkpoints" / f"step-{step:06d}", ignore_errors=True)
    kept = sorted(path.name for path in (cut / "checkpoints").iterdir())
    assert kept, "no checkpoint from before the kill is left"
    shutil.rmtree(tmp_path / "cache" / "references", ignore_errors=True)  # what the run needs lies beside it
    train_recipe(None, cut, resume=True)
    assert rows(cut) == found
    assert checkpoint_files(cut) == checkpoint_files(whole)
    assert (whole / "reference").exists() == (reference == "cached")


def test_a_second_run_finds_the_numbers_of_the_first(tmp_path: Path, pairs: Path) -> None:
    recipe = start(tmp_path / "a", pairs, schedule={"steps": 1, "warmup": 0})
    train_recipe(recipe, tmp_path / "a")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "references").iterdir()}
    assert len(before) == 2, "one for each split"
    other = recipe.model_copy(update={"objective": recipe.objective.model_copy(update={"beta": 0.5})})
    train_recipe(other, tmp_path / "b")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache" / "references").iterdir()} == before
    assert np.array_equal(
        np.load(tmp_path / "a/reference/train.npy"), np.load(tmp_path / "b/reference/train.npy")
    )


def test_a_resumed_run_without_its_reference_is_refused(tmp_path: Path, pairs: Path) -> None:
    recipe = start(tmp_path / "a", pairs, schedule={"steps": 2, "warmup": 0})
    train_recipe(recipe, tmp_path / "a")
    shutil.rmtree(tmp_path / "a" / "reference")
    with pytest.raises(DataError, match=r"reference.*cannot be read"):
        train_recipe(None, tmp_path / "a", resume=True)
