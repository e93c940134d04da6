"""A disk that is full or turns read-only in mid-run, with several ranks: one message, and the run resumes once it can write."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rush.errors import RankLost
from rush.records.checkpoint_store import CheckpointStore, verify
from tests.fresh_cache import fresh_cache
from tests.parallel.fault_work import Ended, Fault, train
from tests.training.small_runs import small_recipe, write_corpus

STEPS = 6


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    path = folder / "small.toml"
    run = {"save_every": 1, "keep": 1000, "timeout_s": 60.0, "sample_every": 0, "validate_every": 0}
    text = small_recipe(write_corpus(folder / "corpus"), schedule={"steps": STEPS, "warmup": 2}, run=run)
    path.write_text(text)
    return path


def go(recipe: Path, out: Path, log: Path, *words: str, fault: Fault | None = None) -> Ended:
    more = {"RUSH_CACHE": str(fresh_cache(recipe.parent / "cache")), "CHECKPOINTS": str(out / "checkpoints")}
    return train([recipe, "layout.ddp=2", "--out", out, *words], log, fault=fault, more=more)


def intact(out: Path) -> list[int]:
    """The steps of the checkpoints, each verified to the last byte."""
    store = CheckpointStore(out / "checkpoints")
    return [verify(store.path(step)).step for step in store.steps()]


def check_message(said: str, out: Path, rank: int | None, reason: str, advice: str) -> None:
    """One message: the rank, the reason, what to do, and how to resume."""
    assert said.count("error") == 1, said
    who = r"rank \d: " if rank is None else f"rank {rank}: "
    assert re.search(rf"error: {who}Cannot write .*: {reason}\. {advice}", said), said
    assert "is intact: resume from it with `rush train" in said
    assert f"--out {out} --resume --nproc 2`" in said


@pytest.mark.slow
def test_a_disk_that_fills_up_is_one_message_and_the_run_resumes_once_there_is_room(
    recipe: Path, small_disk: Path, tmp_path: Path
) -> None:
    out, log = small_disk / "run", tmp_path / "log"
    ended = go(recipe, out, log)
    assert ended.codes == [4, 4], ended.said
    check_message(ended.said, out, None, r"the disk is full \(No space left on device\)", "Free space")
    saved = intact(out)
    assert 0 < len(saved) < STEPS
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    again = go(recipe, out, log, "--resume")
    assert again.codes == [0, 0], again.said
    assert intact(out) == [*range(1, STEPS + 1)]


@pytest.mark.slow
def test_a_disk_that_has_no_room_for_a_row_of_metrics_is_one_message(
    recipe: Path, small_disk: Path, tmp_path: Path
) -> None:
    out, log = small_disk / "run", tmp_path / "log"
    # The rows of twenty steps are more than the page that the file has already.
    words = ("run.save_every=20", "run.save_async=false", "schedule.steps=40")
    ended = go(recipe, out, log, *words, fault=Fault("full", 0, 21))
    assert ended.codes[0] == 4, ended.said
    assert ended.codes[1] in (4, RankLost.exit_code), (
        ended.said
    )  # a launcher's is that of the rank that failed
    check_message(ended.said, out, 0, r"the disk is full \(No space left on device\)", "Free space")
    assert intact(out) == [20]
    (small_disk / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    again = go(recipe, out, log, *words, "--resume")
    assert again.codes == [0, 0], again.said
    assert intact(out) == [20, 40]


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A run folder whose checkpoints a rank makes read-only; skipped where mounting is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    out = tmp_path / "run"
    yield out
    subprocess.run(["umount", str(out / "checkpoints")], check=False)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_disk_that_turns_read_only_is_one_message_and_the_run_resumes(
    rank: int, recipe: Path, read_only: Path, tmp_path: Path
) -> None:
    ended = go(recipe, read_only, tmp_path / "log", fault=Fault("read-only", rank, 3))
    assert ended.codes == [4, 4], ended.said
    check_message(ended.said, read_only, None, r"the disk is read-only \(.*\)", "Make it writable")
    assert 0 < len(intact(read_only)) < STEPS
    subprocess.run(["umount", str(read_only / "checkpoints")], check=True)
    again = go(recipe, read_only, tmp_path / "log", "--resume")
    assert again.codes == [0, 0], again.said
    assert intact(read_only) == [*range(1, STEPS + 1)]
