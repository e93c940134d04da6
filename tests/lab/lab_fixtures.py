"""Ladders small enough to climb in seconds: a model of ten thousand parameters on this project's own text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rush.lab.scaling import rank_runner
from rush.lab.trial import runner
from rush.lab.trial.starter import Starter
from tests.forks import shared_starter
from tests.fresh_cache import fresh_cache
from tests.small_recipe import write_small_recipe

PLANTED_SLEEP = f"987.{os.getpid()}"
"""What a planted technique that hangs leaves running; the tests of another process have another."""


class Lent:
    """A starter that outlives the study it is lent to."""

    def __init__(self, starter: Starter) -> None:
        self.run, self.rush = starter.run, starter.rush

    def close(self) -> None:
        pass


@pytest.fixture(scope="session")
def starter() -> Iterator[Starter]:
    """One forking process for all trials of these tests: it does nothing but its imports, and those take seconds."""
    starter = shared_starter()
    yield starter
    starter.close()


@pytest.fixture(scope="session")
def lab_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def surroundings(lab_cache: Path, starter: Starter, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (runner, rank_runner):
        monkeypatch.setattr(module, "Starter", lambda *given, **options: Lent(starter))
    monkeypatch.setenv("PLANTED_SLEEP", PLANTED_SLEEP)
    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(lab_cache)))
    # One thread: with two, every other process on a small machine makes them wait for each other.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def small_recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_recipe(tmp_path_factory.mktemp("recipe"))


@pytest.fixture
def ladder_file(tmp_path: Path, small_recipe: Path) -> Callable[..., Path]:
    """Writes a ladder with these rungs (TOML values) and returns its path."""

    def write(rungs: list[str], base: str = "", parity_steps: int = 3, **measure: Any) -> Path:
        settings = {
            "processes": 1,
            "windows": 5,
            "window_ms": 1.0,
            "warmup_max_steps": 8,
            "limit_s": 60.0,
            **measure,
        }
        path = tmp_path / "ladder.toml"
        lines = [f"recipe = {json.dumps(str(small_recipe))}", f"rungs = [{', '.join(rungs)}]", "[base]", base]
        lines += ["[measure]", *(f"{key} = {value}" for key, value in settings.items())]
        lines += ["[parity]", f"steps = {parity_steps}"]
        path.write_text("\n".join(lines) + "\n")
        return path

    return write
