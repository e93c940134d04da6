"""Every ready recipe lives on a GPU: its own techniques, its true width and vocabulary, few layers where there are many.

A life is short (4 steps), but a whole model would write tens of gigabytes: whatever is larger than GPT-2 124M has
two layers, Llama 3.1 8B, whose head is not tied, a smaller vocabulary besides; their names say so.
`llama-3.2-1b-fp8` lives once in its whole depth.

RUSH_LIVES_RECORD=FILE.jsonl     appends a line for each life: recipe, parts, seconds, problem, what is reduced
RUSH_LIVES_DETERMINISTIC=1       with run.deterministic, and the undisturbed run besides, for the same bits
RUSH_LIVES_TRUE_BATCH=1          with the recipe's own micro batch (needs the card alone)
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rush.hardware import probe
from rush.lab.life.life import EVERY, LifeResult, Lives, short
from rush.lab.trial.starter import COMMANDS, Starter
from rush.ready import RECIPES
from rush.recipe_io import changed
from tests.gpu.card_shares import card_share
from tests.lives.ready_recipes import FEW, Lived, LocalData, as_far_as_it_runs, as_published, shallow

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

LAYERS, TOKENS, TEXT_BYTES = 2, 8192, 3_000_000
HELD_OUT = 64
"""Sequences of a validation: enough that rounding in bf16, 0.02 of a token's loss, averages out."""
WHOLE = ("gpt2-124m", "tiny", "llama-tiny")
"""Models that live in their whole depth."""
VOCABULARY = {"llama-3.1-8b": 16_384}
MEMORY_DISK, ROOM_BYTES = Path("/dev/shm"), 48 << 30
TRUE_BATCH = os.environ.get("RUSH_LIVES_TRUE_BATCH") == "1"
DETERMINISTIC = os.environ.get("RUSH_LIVES_DETERMINISTIC") == "1"
PARTS = tuple(part for part in EVERY if part != "repeat" or DETERMINISTIC)


def _reduced(name: str) -> Lived:
    recipe = as_published(name)
    depth = recipe.shape().num_layers if recipe.model.name in WHOLE else LAYERS
    vocabulary = VOCABULARY.get(recipe.model.name, recipe.shape().vocab_size)
    return shallow(Lived(name, recipe, ()), depth, vocabulary, 1 << 40 if TRUE_BATCH else TOKENS)


@pytest.fixture(scope="session")
def starter() -> Iterator[Starter]:
    with pytest.MonkeyPatch.context() as surroundings:
        surroundings.setenv(
            "OMP_NUM_THREADS", "2"
        )  # hashes aside, a host's work here is to widen and to add weights
        starter = Starter(COMMANDS)
        yield starter
        starter.close()


@pytest.fixture(scope="session")
def place() -> Iterator[Path]:
    """A folder with room for checkpoints: in memory, where there is enough of it."""
    roomy = MEMORY_DISK.is_dir() and shutil.disk_usage(MEMORY_DISK).free > ROOM_BYTES
    folder = Path(tempfile.mkdtemp(prefix="lives-", dir=MEMORY_DISK if roomy else None))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def data(place: Path) -> LocalData:
    return LocalData(place / "data", TEXT_BYTES, words=None)


def _live(lived: Lived, starter: Starter, place: Path, data: LocalData, **changes: Any) -> LifeResult:
    """The life of a recipe in a folder that is gone afterwards; written down where one wants to know."""
    machine = probe("cuda")
    found = as_far_as_it_runs(lived.name, lived.recipe, machine)
    local = {"run.device": "cuda", "data.validation": 0.2, "run.deterministic": DETERMINISTIC}
    recipe = short(
        data.of(changed(found.recipe, local)), **{**FEW, "run.validate_sequences": HELD_OUT, **changes}
    )
    folder = place / f"{lived.name}-{recipe.shape().num_layers}"
    life = Lives(starter, folder, {"RUSH_CACHE": str(place / "cache")}, limit_s=400.0).live(recipe, PARTS)
    if life.problem is None:
        shutil.rmtree(folder)
    else:  # what was said stays; gigabytes of weights do not
        for large in ("run/checkpoints", "undisturbed", "exported", "merged"):
            shutil.rmtree(folder / large, ignore_errors=True)
    if record := os.environ.get("RUSH_LIVES_RECORD"):
        said = {
            "recipe": lived.name,
            "problem": life.problem,
            "left_out": found.left_out,
            "reduced": lived.reduced,
            "steps": recipe.schedule.steps,
            "micro": recipe.micro,
            "sequence": recipe.batch.sequence,
            "deterministic": DETERMINISTIC,
            "seconds": round(sum(part.seconds for part in life.parts), 1),
            "parts": [asdict(part) for part in life.parts],
            "device": machine.summary(),
            "torch": torch.__version__,
        }
        with open(record, "a") as lines:
            lines.write(json.dumps(said) + "\n")
    assert found.left_out == ()
    return life


@pytest.mark.parametrize("lived", [_reduced(name) for name in RECIPES.names()], ids=lambda lived: lived.id)
def test_a_ready_recipe_lives_on_a_gpu(lived: Lived, starter: Starter, place: Path, data: LocalData) -> None:
    with card_share():
        assert _live(lived, starter, place, data).problem is None


def test_llama_3_2_1b_fp8_lives_in_its_whole_depth(starter: Starter, place: Path, data: LocalData) -> None:
    recipe = as_published("llama-3.2-1b-fp8")
    lived = Lived("llama-3.2-1b-fp8", recipe, ())
    if not TRUE_BATCH:  # it shares the card with other tests
        recipe = changed(recipe, {"batch": {"micro": 4, "sequence": recipe.batch.sequence}})
        lived = replace(lived, recipe=recipe, reduced=("micro batches of 4 of 16 sequences",))
    steps = {"schedule.steps": 8, "run.save_every": 4, "run.validate_every": 4, "run.sample_every": 4}
    with card_share():
        assert _live(lived, starter, place, data, **steps).problem is None
