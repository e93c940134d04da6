"""`schedule.epochs`: counted by reading, resolved once, resumed, and what is said about repetition."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rush.data.document_loader import DocumentLoader
from rush.data.loader import Loader
from rush.data.packing import BestFit, Flatten, Packing, Pad
from rush.errors import RecipeError
from rush.recipe_io import changed, load_recipe, write_toml
from rush.training.epochs import repetition_advice, with_steps
from rush.training.loop import train_recipe
from rush.training.schedule import learning_rate
from rush.training.view import View
from tests.data.small_documents import SmallDocuments, realistic_lengths
from tests.training.small_runs import small_recipe, write_corpus

LENGTHS = realistic_lengths(53, longest=33)


class Numbered:
    """Windows that are told apart by their number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def window(self, index: int) -> Any:
        return np.full(5, index)

    def sample_name(self, index: int) -> str:
        return str(index)


def windows(count: int, per_step: int = 4) -> Loader:
    return Loader(Numbered(count), samples_per_step=per_step, micro=2, seed=1)


def documents(packing: Packing) -> DocumentLoader:
    return DocumentLoader(
        SmallDocuments(LENGTHS), micro=2, sequence=32, batches_per_step=3, seed=7, packing=packing
    )


def times_read(loader: Any, steps: int) -> Counter[str]:
    return Counter(name for _ in range(steps) for batch in loader.next_step() for name in batch.samples)


@pytest.mark.parametrize("epochs", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [3, 4, 17, 40])
def test_windows_are_read_as_often_as_epochs_says_and_one_step_less_is_too_few(
    count: int, epochs: int
) -> None:
    steps = windows(count).steps_in(epochs)
    assert min(times_read(windows(count), steps).values()) >= epochs
    fewer = times_read(windows(count), steps - 1)
    assert len(fewer) < count or min(fewer.values()) < epochs
    loader = windows(count)
    times_read(loader, steps)
    assert loader.epoch == pytest.approx(windows(count).epochs_in(steps))
    assert loader.epoch >= epochs


@pytest.mark.parametrize("epochs", [1, 2, 3])
@pytest.mark.parametrize("packing", [Pad(), BestFit(window=9), Flatten(window=9)], ids=str)
def test_documents_are_read_as_often_as_epochs_says(packing: Packing, epochs: int) -> None:
    loader = documents(packing)
    steps = loader.steps_in(epochs)
    read = times_read(loader, steps)
    assert len(read) == len(LENGTHS)
    assert min(read.values()) == epochs
    assert epochs <= loader.epoch < epochs + 0.3  # the last step may begin another pass
    fewer = times_read(documents(packing), steps - 1)
    assert len(fewer) < len(LENGTHS) or min(fewer.values()) < epochs


def test_half_an_epoch_is_half_the_steps() -> None:
    assert windows(40).steps_in(0.5) == 5
    assert windows(40).steps_in(0.01) == 1


def test_steps_and_epochs_replace_each_other() -> None:
    recipe = load_recipe("tiny", ["schedule.epochs=3", "schedule.warmup=0"])
    assert recipe.schedule.epochs == 3
    assert recipe.schedule.steps is None
    assert changed(recipe, {"schedule.steps": 7}).schedule.epochs is None
    with pytest.raises(RecipeError, match=r"schedule.epochs is 3, whose number of steps depends on the data"):
        recipe.steps  # noqa: B018
    with pytest.raises(RecipeError, match=r"schedule.steps is missing; .* schedule.epochs=VALUE"):
        load_recipe("tiny", ["schedule={kind='cosine'}"])
    with pytest.raises(RecipeError, match=r"schedule.epochs is 0"):
        load_recipe("tiny", ["schedule.epochs=0"])


def test_a_warm_up_below_one_is_a_fraction_of_all_steps() -> None:
    recipe = load_recipe("tiny", ["schedule.steps=40", "schedule.warmup=0.1", "optimizer.lr=0.4"])
    assert [learning_rate(recipe, step) for step in (1, 2, 3, 4)] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert learning_rate(recipe, 5) < 0.4


def test_steps_that_contradict_the_epochs_are_refused() -> None:
    recipe = with_steps(load_recipe("tiny", ["schedule.epochs=2", "schedule.warmup=0"]), windows(40))
    assert recipe.steps == 20
    assert with_steps(recipe, windows(40)) == recipe  # the recipe of a run, read again
    with pytest.raises(RecipeError, match=r"schedule.steps is 20, but schedule.epochs = 2 .* are 10 steps"):
        with_steps(recipe, windows(20))


def test_repetition_is_pointed_out_and_its_absence_is_not() -> None:
    recipe = load_recipe("tiny", ["schedule.steps=50"])
    assert "read 20 times: 50 steps, one pass is 3" in (repetition_advice(recipe, windows(10)) or "")
    assert repetition_advice(recipe, windows(50)) is None  # exactly four
    assert repetition_advice(recipe, windows(100_000)) is None  # pretraining seldom reads all
    tuned = load_recipe("sft-tiny", ["schedule.steps=50"])
    assert "Only 0.2% of the training data" in (repetition_advice(tuned, windows(100_000)) or "")


class Notes(View):
    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.notes: list[str] = []

    def row(self, row: Any) -> None:
        self.rows.append(row)

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_a_run_of_epochs_records_steps_and_passes_and_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUSH_CACHE", str(tmp_path / "cache"))
    text = small_recipe(
        write_corpus(tmp_path / "text"), run={"save_every": 0, "validate_every": 0, "sample_every": 0}
    )
    (tmp_path / "recipe.toml").write_text(text)
    recipe = load_recipe(
        str(tmp_path / "recipe.toml"),
        [
            "data.limit=8",
            "schedule.epochs=1",
            "schedule.warmup=0.2",
            "batch.micro=32",
            "batch.sequence=64",
            "batch.total_tokens=8192",
        ],
    )
    view = Notes()
    summary = train_recipe(recipe, tmp_path / "run", view=view)
    stored = load_recipe(str(tmp_path / "run" / "recipe.toml"))
    assert (stored.schedule.epochs, stored.steps) == (1, summary.steps)
    assert 1 <= summary.epochs < 1 + 1 / summary.steps + 1e-6
    assert [row["epoch"] for row in view.rows] == sorted(row["epoch"] for row in view.rows)
    assert load_recipe(str(tmp_path / "run" / "recipe.toml")).digest == stored.digest
    assert "epochs = 1.0" in write_toml(stored)
    again = train_recipe(
        recipe, tmp_path / "run", resume=True
    )  # as it was started: without a number of steps
    assert again.step == summary.step
