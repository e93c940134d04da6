"""On a CUDA device: the time of a step is the device's, also where the host launches more slowly than the device works."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from tests.training.small_runs import rush_alone, small_recipe, write_corpus

pytestmark = [pytest.mark.gpu, pytest.mark.alone]


def test_a_step_before_a_pause_takes_as_long_as_the_others(tmp_path: Path) -> None:
    """So small a model waits for the host, which hears of a step's end after it has launched the next. Before a validation
    nothing is launched: the step before it was once credited with the rest only, a hundredth of its time."""
    run = {"save_every": 0, "validate_every": 10, "sample_tokens": 0, "deterministic": False}
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(small_recipe(write_corpus(tmp_path / "corpus"), run=run, schedule={"steps": 40}))
    words = ["train", recipe, "techniques=['fused_adamw']", "--out", tmp_path / "run"]
    done = rush_alone(*words, cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    took = {row["step"]: row["step_s"] for row in map(json.loads, lines)}
    usual = statistics.median(seconds for step, seconds in took.items() if step % 10)
    before_pauses = statistics.median(seconds for step, seconds in took.items() if step % 10 == 0)
    assert 0.4 * usual < before_pauses < 2.5 * usual, took
