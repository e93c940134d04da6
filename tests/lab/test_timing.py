"""The clock: what a sample holds, and that samples add up to the time that training takes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rush.data import Steps
from rush.hardware import probe
from rush.lab.paired import Timed
from rush.lab.trial import timing
from rush.lab.trial.timing import Stepper, Timing, rates, time_steps, timed
from rush.recipe_io import changed, load_recipe
from rush.training.build import build
from rush.training.corpus import open_corpus

SHORT = Timing(windows=5, window_ms=0.0, warmup_max_steps=6, timed_max_s=30.0)


class Growing:
    """A loader whose every step has one row more to learn from than the one before."""

    def __init__(self, loader: Steps) -> None:
        self.loader, self.made = loader, 0

    def next_step(self) -> list[Any]:
        batches = list(self.loader.next_step())
        self.made += 1
        for batch in batches:
            batch.labels_bt[:] = -100
            batch.labels_bt[0, : self.made] = 1
        return batches


def test_each_sample_counts_the_tokens_of_its_own_steps(small_recipe: Path) -> None:
    recipe = load_recipe(str(small_recipe))
    run = build(recipe, probe("cpu"))
    with open_corpus(recipe, None, lambda text: None).loader(recipe, run.loader_options) as loader:
        growing = Growing(loader)
        found = time_steps(run, growing, SHORT)  # type: ignore[arg-type]
    labels = found["sample_tokens"]["trained"]
    assert not found["hopeless"]
    assert len(labels) == len(found["samples_s"]) == 5
    # The last steps that were made, in their order, and none of the warm-up's.
    assert labels == [growing.made - 4 + number for number in range(5)]
    assert found["sample_steps"] == labels, "the step a sample began with; here each has as many labels"
    assert timed(found) == Timed(rates(found), [64] * 5, found["sample_steps"], 1)
    assert found["sample_tokens"]["processed"] == [64] * 5
    assert rates(found, "trained") == [
        count / seconds for count, seconds in zip(labels, found["samples_s"], strict=True)
    ]


@pytest.mark.parametrize("warm_up", [1, 3, 10])
def test_uneven_batches_are_timed_from_a_step_that_all_recipes_come_by(
    small_recipe: Path, warm_up: int
) -> None:
    recipe = load_recipe(str(small_recipe))
    run = build(recipe, probe("cpu"))
    with open_corpus(recipe, None, lambda text: None).loader(recipe, run.loader_options) as loader:
        # The labels that count differ from step to step, as conversations' do.
        run.recipe = changed(recipe, {"objective.kind": "sft"})
        short = replace(SHORT, warmup_max_steps=warm_up)
        found = time_steps(run, Growing(loader), short)  # type: ignore[arg-type]
    assert (found["sample_steps"][0] - 1) % timing.COMMON == 0
    assert found["warmup_steps"] == found["sample_steps"][0] - 1


def test_a_sample_of_several_steps_is_their_mean(small_recipe: Path) -> None:
    recipe = load_recipe(str(small_recipe))
    run = build(recipe, probe("cpu"))
    with open_corpus(recipe, None, lambda text: None).loader(recipe, run.loader_options) as loader:
        stepper = Stepper(run, Growing(loader))  # type: ignore[arg-type]
        stepper()  # looked at only when the next is under way
        samples, tokens, began = timing._timed(stepper, timing._by_host, 2, 3)
    assert len(samples) == 2
    assert [each["trained"] for each in tokens] == [3.0, 6.0]
    assert began == [2, 5]


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_samples_add_up_to_the_time_of_training() -> None:
    """Long steps of few kernels: the device is never without work, and what is timed is what a clock on the wall says."""
    recipe = load_recipe(
        "gpt2-124m",
        [
            "data.source=python-stdlib", "data.tokenizer=train", "data.vocab_size=2048",
            "techniques=['amp_bf16','flash_attention','loader_workers','pin_memory']",
            "batch.micro=32", "batch.total_tokens=32768",
        ],
    )  # fmt: skip
    run = build(recipe, probe("cuda"))
    with open_corpus(recipe, None, lambda text: None).loader(recipe, run.loader_options) as loader:
        stepper = Stepper(run, loader)
        for _ in range(5):
            stepper()
        stepper.settle()
        torch.cuda.synchronize()
        began = time.perf_counter()
        samples, *_ = timing._timed(stepper, timing._by_device, 12, 1)
        wall = time.perf_counter() - began
    # The wall's clock has one step more: the one before the first window.
    assert sum(samples) == pytest.approx(wall * 12 / 13, rel=0.04)


def test_what_is_plainly_too_slow_ends_with_its_warm_up(small_recipe: Path) -> None:
    recipe = load_recipe(str(small_recipe))
    run = build(recipe, probe("cpu"))
    with open_corpus(recipe, None, lambda text: None).loader(recipe, run.loader_options) as loader:
        growing = Growing(loader)
        found = time_steps(run, growing, replace(SHORT, slowest=1e12, warmup_max_steps=1))  # type: ignore[arg-type]
    assert found["hopeless"]
    assert growing.made == 3, "the first, which compiles, one that is too slow, and another to be sure"
    assert found["sample_tokens"]["trained"] == [2, 3] == found["sample_steps"]
    assert len(rates(found)) == 2
