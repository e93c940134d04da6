"""How long compiling took is known from the first step alone, which a made-up clock makes slow here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rush.hardware import probe
from rush.lab.trial import timing
from rush.lab.trial.timing import Stepper, time_steps
from rush.recipe_io import load_recipe
from rush.training.build import build
from rush.training.corpus import open_corpus
from tests.lab.test_timing import SHORT

FIRST_S, USUAL_S = 3.0, 0.25


@pytest.mark.parametrize(("window_ms", "steps"), [(0.0, 1), (600.0, 3)])
def test_compile_time_is_the_first_step_less_a_usual_one(
    window_ms: float, steps: int, small_recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0

    def clock(call: Stepper, windows: int, per_window: int) -> list[float]:
        nonlocal made
        for _ in range(windows * per_window):
            call()
        made += windows
        return [FIRST_S if made == 1 else USUAL_S * per_window] * windows

    monkeypatch.setattr(timing, "_clock", lambda device: clock)
    recipe = load_recipe(str(small_recipe))
    run = build(recipe, probe("cpu"))
    with open_corpus(recipe, None, lambda text: None).loader(recipe, run.loader_options) as loader:
        found = time_steps(run, loader, replace(SHORT, window_ms=window_ms))
    assert found["compile_s"] == FIRST_S - USUAL_S
    assert found["steps_per_sample"] == steps
    assert set(found["samples_s"]) == {USUAL_S}, (
        "a sample is the mean of its steps, and has nothing of the first"
    )
    assert found["warmup_s"] == USUAL_S * (found["warmup_steps"] - 1)
