"""A recipe small enough to tune in seconds: a model of ten thousand parameters on this project's own text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fresh_cache import fresh_cache
from tests.small_recipe import write_small_recipe


@pytest.fixture(scope="session")
def tune_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _surroundings(tune_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(tune_cache)))
    # Kernels that are only interpreted here are no candidates.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    # One thread: with two, every other process on a small machine makes them wait for each other.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def small_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_recipe(
        tmp_path_factory.mktemp("recipe"),
        batch="total_tokens = 256",
        run="sample_tokens = 0\n        tensorboard = false",
        steps=4,
    )
