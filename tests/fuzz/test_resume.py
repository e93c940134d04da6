"""A run whose checkpoint someone has changed and sealed again resumes, or is refused in one message."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rush.api import train
from rush.recipe_io import load_recipe
from rush.records.run_folder import RunFolder
from tests.fresh_cache import fresh_cache
from tests.fuzz.harness import cases, fuzz
from tests.fuzz.test_checkpoints import seal
from tests.training.small_runs import small_recipe, write_corpus


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunFolder]:
    """A run of two steps of three."""
    path = tmp_path_factory.mktemp("resumed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RUSH_CACHE", str(fresh_cache(path / "cache")))
        text = small_recipe(
            write_corpus(path / "corpus"),
            schedule={"steps": 3, "warmup": 1},
            run={"validate_every": 0, "sample_every": 0, "save_async": False, "sample_tokens": 0},
        )
        (path / "small.toml").write_text(text)
        train(load_recipe(str(path / "small.toml")), out=path / "run")
        run = RunFolder(path / "run")
        shutil.rmtree(run.checkpoints.path(3))
        yield run


@cases(0.01)
def test_any_state_of_a_resumed_run(count: int, trained: RunFolder, tmp_path: Path) -> None:
    seed = (trained.checkpoints.path(2) / "state.json").read_bytes()

    def read(content: bytes) -> None:
        run = RunFolder(tmp_path / "run")
        shutil.rmtree(run.path, ignore_errors=True)
        shutil.copytree(trained.path, run.path)
        last = run.checkpoints.path(2)
        (last / "state.json").write_bytes(content)
        seal(last, 2)
        train(out=run.path, resume=True)

    fuzz("resume", read, [seed], count)
