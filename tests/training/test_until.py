"""`rush train --until`: a run in legs, each of which ends with a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from rush.errors import RecipeError
from rush.recipe_io import load_recipe
from rush.records.metrics import MetricsRow, read_rows
from rush.records.run_folder import RunFolder
from rush.training.loop import train_recipe
from tests.fresh_cache import fresh_cache
from tests.training.small_runs import small_recipe, write_corpus

LOSSES = ("step", "loss", "grad_norm", "lr", "val_loss")


def losses(folder: Path) -> list[dict[str, object]]:
    rows = read_rows(RunFolder(folder).metrics, MetricsRow)
    return [{key: row[key] for key in LOSSES if key in row} for row in rows]  # type: ignore[literal-required]


def test_a_run_in_legs_is_the_run_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(tmp_path / "cache")))
    schedule, run = {"steps": 6, "warmup": 1}, {"save_every": 0, "validate_every": 2}
    (path := tmp_path / "small.toml").write_text(
        small_recipe(write_corpus(tmp_path / "text"), schedule=schedule, run=run)
    )
    recipe = load_recipe(str(path))
    legs, whole = tmp_path / "legs", tmp_path / "whole"
    first = train_recipe(recipe, legs, until=2)
    assert (first.step, first.interrupted) == (2, True)
    assert RunFolder(legs).checkpoints.steps() == [2]
    with pytest.raises(RecipeError, match="--until is 2, but the run is at step 2"):
        train_recipe(None, legs, resume=True, until=2)
    assert train_recipe(None, legs, resume=True, until=4).step == 4
    last = train_recipe(None, legs, resume=True, until=100)
    assert (last.step, last.interrupted) == (6, False)
    train_recipe(recipe, whole)
    assert losses(legs) == losses(whole)
