"""Weights that cannot move are told before the first step, and the others are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rush.recipe_io import load_recipe
from rush.training.loop import train_recipe
from rush.training.lost_updates import movable
from tests.fresh_cache import fresh_cache
from tests.training.small_runs import small_recipe, write_corpus
from tests.training.test_loop import Listener


def test_a_value_moves_if_the_nearest_number_after_the_step_is_another() -> None:
    values = (torch.randn(4096, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    for step in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3):
        moved = (values.double() + step).bfloat16() != values
        # By a step that is half the last bit exactly, half of them move: to the even neighbour.
        assert movable(values, step) == pytest.approx(float(moved.float().mean()), abs=0.03), step
    assert movable(torch.zeros(3, dtype=torch.bfloat16), 1e-9) == 1.0
    assert movable(torch.ones(3), 1e-5) == 1.0


@pytest.mark.parametrize(
    ("techniques", "lr", "told"),
    [
        ("['pure_bf16']", 1e-5, True),
        pytest.param("['pure_bf16']", 1e-2, False, marks=pytest.mark.slow),
        ("['bf16_master']", 1e-5, False),
        ("['pure_bf16', {name='fused_update', stochastic_rounding=true}]", 1e-5, False),
        pytest.param("['pure_bf16', 'fused_update']", 1e-5, True, marks=pytest.mark.slow),
        pytest.param("['amp_bf16']", 1e-5, False, marks=pytest.mark.slow),
        ("[]", 1e-6, False),
    ],
)
def test_a_run_reports_whether_its_updates_are_lost_to_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, techniques: str, lr: float, told: bool
) -> None:
    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(tmp_path / "cache")))
    text = small_recipe(write_corpus(tmp_path / "corpus"), schedule={"steps": 1, "warmup": 0})
    (tmp_path / "recipe.toml").write_text(text)
    recipe = load_recipe(str(tmp_path / "recipe.toml"), [f"techniques={techniques}", f"optimizer.lr={lr}"])
    listener = Listener()
    train_recipe(recipe, tmp_path / "out", view=listener)
    said = [note for note in listener.notes if "can change" in note]
    assert len(said) == told
    if told:
        assert said[0].startswith("Only ")
        assert "they are bfloat16 with round-to-nearest" in said[0]
        assert "fused_update" in said[0]
