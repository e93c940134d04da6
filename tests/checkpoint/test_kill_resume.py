"""A run that is killed at any instant and resumed ends with the same bits as one left alone.

Real processes, real SIGKILLs. A chain of kills is one run: start, kill, resume, kill, … (each start a fork of what has
imported everything, so that the kills hit the run and not its imports). After every kill all that is on disk (rows, samples, sealed checkpoints) must be a beginning of the undisturbed
run, byte for byte; at the end all of it must be there.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fresh_cache import fresh_cache
from tests.training.forked_runs import ForkedRush
from tests.training.small_runs import checkpoint_files, rows, rush, small_recipe, write_corpus

STEPS = {3: 30, 14: 80}
"""More than all kills of a chain leave behind."""


def undisturbed(tmp_path: Path, recipe: Path, cache: Path) -> Path:
    done = rush("train", recipe, "run.keep=1000", "--out", tmp_path / "whole", cache=cache)
    assert done.returncode == 0, done.stderr
    return tmp_path / "whole"


def kill_when(process: ForkedRush, ready: Callable[[], bool], limit_s: float) -> bool:
    """SIGKILL the process as soon as `ready` says so; False if it ended by itself before."""
    deadline = time.monotonic() + limit_s
    while process.poll() is None and not ready():
        assert time.monotonic() < deadline, "the run made no progress"
        time.sleep(0.0005)
    alive = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    return alive


def instants(folder: Path, chance: random.Random) -> list[tuple[str, Callable[[], bool]]]:
    """The instants to kill at, of three kinds: by the clock, inside a save, between steps."""

    def by_clock() -> Callable[[], bool]:
        at = time.monotonic() + chance.uniform(0.05, 0.6)
        return lambda: time.monotonic() >= at

    def in_save() -> Callable[[], bool]:
        begun, skip = len(rows(folder)), chance.randint(1, 3)

        def ready() -> bool:
            writing = any((folder / "checkpoints").glob(".writing-*"))
            return writing and len(rows(folder)) >= begun + skip

        return ready

    def between_steps() -> Callable[[], bool]:
        begun, wait = len(rows(folder)), chance.randint(1, 6)
        return lambda: len(rows(folder)) >= begun + wait

    return [("by the clock", by_clock), ("inside a save", in_save), ("between steps", between_steps)]  # type: ignore[list-item]


def assert_a_beginning(folder: Path, whole: Path, when: str) -> None:
    """What the killed run left is the beginning of the undisturbed run, to the byte."""
    for name in ("metrics.jsonl", "samples.jsonl"):
        found, expected = rows(folder, name), rows(whole, name)
        assert found == expected[: len(found)], f"{name} differs after a kill {when}"
    expected_files = checkpoint_files(whole)
    for name, content in checkpoint_files(folder).items():
        assert content == expected_files[name], f"{name} differs after a kill {when}"


@pytest.mark.timeout(600)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kills"),
    [(family, 14) for family in ("gpt2", "llama")],
)
def test_killed_at_any_instant_the_resumed_run_is_the_same_to_the_last_bit(
    tmp_path: Path, family: str, kills: int
) -> None:
    cache, folder = tmp_path / "cache", tmp_path / "killed"
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        small_recipe(write_corpus(tmp_path / "corpus"), family, schedule={"steps": STEPS[kills], "warmup": 5})
    )
    whole = undisturbed(tmp_path, recipe, cache)
    assert len(rows(whole)) == STEPS[kills]
    chance = random.Random(family)
    in_save = 0
    killed: list[str] = []
    while len(killed) < kills:
        kind, plan = instants(folder, chance)[len(killed) % 3]
        process = ForkedRush("train", recipe, "run.keep=1000", "--out", folder, "--resume", cache=cache)
        alive = kill_when(process, plan(), limit_s=60)
        assert alive, f"the run ended after {len(rows(folder))} steps, before kill {len(killed) + 1}"
        in_save += any((folder / "checkpoints").glob(".writing-*"))
        killed.append(kind)
        assert_a_beginning(folder, whole, kind)
    assert in_save >= max(1, kills // 4), f"only {in_save} kills left a half-written checkpoint"
    assert ForkedRush("train", recipe, "run.keep=1000", "--out", folder, "--resume", cache=cache).wait() == 0
    assert rows(folder) == rows(whole)
    assert rows(folder, "samples.jsonl") == rows(whole, "samples.jsonl")
    assert checkpoint_files(folder) == checkpoint_files(whole)
    assert not any((folder / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_an_interrupted_run_saves_and_says_how_to_go_on(tmp_path: Path) -> None:
    cache, folder = tmp_path / "cache", tmp_path / "run"
    recipe = tmp_path / "recipe.toml"
    corpus = write_corpus(tmp_path / "corpus")
    changes: dict[str, Any] = {"schedule": {"steps": 4000}, "run": {"save_every": 0, "tensorboard": False}}
    recipe.write_text(small_recipe(corpus, **changes))
    process = ForkedRush("train", recipe, "--out", folder, cache=fresh_cache(cache))
    while len(rows(folder)) < 3:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 130
    last = rows(folder)[-1]["step"]
    assert list(checkpoint_files(folder)) != []
    assert (folder / "checkpoints" / f"step-{last:06d}" / "manifest.json").is_file()
