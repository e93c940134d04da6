"""`rush train --nproc`, as a user starts it, with processes killed, stopped and crashed from outside."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.parallel.test_faults import outcome
from tests.parallel.test_train_command import until
from tests.training.small_runs import ROOT, environment, rows, small_recipe, write_corpus

pytestmark = pytest.mark.slow
STEPS = 60
KILLS = 12
Run = subprocess.Popen[str]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command")
    path = folder / "small.toml"
    settings = {"save_every": 4, "drift_every": 5, "timeout_s": 30.0, "sample_tokens": 0, "validate_every": 0}
    path.write_text(
        small_recipe(write_corpus(folder / "corpus"), schedule={"steps": STEPS, "warmup": 2}, run=settings)
    )
    return path


@pytest.fixture(scope="module")
def undisturbed(recipe: Path) -> Path:
    out = recipe.parent / "undisturbed"
    process = command(recipe, out)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    return out


@pytest.fixture
def started() -> Iterator[list[Run]]:
    processes: list[Run] = []
    yield processes
    for process in processes:
        for left in ranks_of(process).values():
            left.kill()
        process.kill()
        process.communicate()


def command(recipe: Path, out: Path, *words: str, nproc: str = "2") -> Run:
    line = ["-m", "rush", "train", str(recipe), "layout.ddp=2", "--nproc", nproc, "--out", str(out), *words]
    return _start(line, recipe)


def torchrun(recipe: Path, out: Path, *words: str, restarts: int) -> Run:
    line = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", str(restarts),
            "-m", "rush", "train", str(recipe), "layout.ddp=2", "--out", str(out), *words]  # fmt: skip
    return _start(line, recipe)


def _start(line: list[str], recipe: Path) -> Run:
    return subprocess.Popen(
        [sys.executable, *line],
        cwd=ROOT,
        env=environment(recipe.parent / "cache"),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def ranks_of(process: Run) -> dict[int, psutil.Process]:
    """The ranks that are there now, by their number."""
    found = {}
    try:
        for child in psutil.Process(process.pid).children(recursive=True):
            try:
                found[int(child.environ()["RANK"])] = child
            except (psutil.Error, KeyError):
                continue
    except psutil.NoSuchProcess:
        pass
    return found


def strike(
    process: Run, out: Path, rank: int, step: int, number: signal.Signals, but: set[int]
) -> psutil.Process:
    """Send a signal to a rank once the run has come to the step; `but` are those that were struck before."""

    def there() -> bool:
        assert process.poll() is None, process.communicate()[0]
        ranks = ranks_of(process)
        new = rank in ranks and ranks[rank].pid not in but
        return new and (rows(out)[-1]["step"] if rows(out) else 0) >= step

    until(there, limit_s=240)
    victim = ranks_of(process)[rank]
    victim.send_signal(number)
    return victim


@pytest.mark.timeout(1800)
def test_twelve_kills_at_random_steps_and_the_same_bits(
    recipe: Path, undisturbed: Path, tmp_path: Path, started: list[Run]
) -> None:
    seed = int(os.environ.get("RUSH_TEST_SEED", "6"))
    dice, out, struck = random.Random(seed), tmp_path / "out", set[int]()
    steps = [
        0,
        1,
        *sorted(dice.sample(range(2, STEPS - 2), KILLS - 2)),
    ]  # the first before it has made a step
    process = command(recipe, out, "--restarts", "20")
    started.append(process)
    for step in steps:
        rank = dice.randrange(2)
        victim = strike(process, out, rank, step, signal.SIGKILL, struck)
        struck.add(victim.pid)
        print(f"seed {seed}: rank {rank} killed at or after step {step}")  # noqa: T201
        until(lambda victim=victim: not victim.is_running())
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert said.count("restarting all ranks") == KILLS, said
    assert outcome(out, STEPS) == outcome(undisturbed, STEPS)


@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGSTOP), (1, signal.SIGSTOP), (1, signal.SIGSEGV)])
def test_a_stopped_or_crashed_rank_is_ended_and_the_run_resumes_to_the_same_bits(
    rank: int, number: signal.Signals, recipe: Path, undisturbed: Path, tmp_path: Path, started: list[Run]
) -> None:
    out = tmp_path / "out"
    process = command(recipe, out)
    started.append(process)
    victim = strike(process, out, rank, 9, number, set())
    began = time.monotonic()
    until(lambda: not victim.is_running(), limit_s=120)
    seconds = time.monotonic() - began
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert outcome(out, STEPS) == outcome(undisturbed, STEPS)
    if number == signal.SIGSTOP:
        assert f"rank {rank} did not join it and sends no heartbeat (it is stopped)" in said
        assert seconds < 80, "after run.timeout_s (30 s), not by the time limit of torch, a minute later"
    else:
        assert "rank 1 was ended by SIGSEGV; restarting all ranks" in said


def test_a_killed_launcher_leaves_nobody_behind_not_even_a_stopped_rank(
    recipe: Path, tmp_path: Path, started: list[Run]
) -> None:
    process = command(recipe, tmp_path / "out", "schedule.steps=100000")
    started.append(process)
    stopped = strike(process, tmp_path / "out", 1, 3, signal.SIGSTOP, set())
    ranks = ranks_of(process)
    process.kill()
    until(lambda: not any(_alive(rank) for rank in ranks.values()), limit_s=15)
    assert not _alive(stopped)


def test_a_second_ctrl_c_ends_ranks_that_cannot_stop(
    recipe: Path, tmp_path: Path, started: list[Run]
) -> None:
    process = command(recipe, tmp_path / "out", "schedule.steps=100000", "run.timeout_s=600")
    started.append(process)
    strike(process, tmp_path / "out", 1, 3, signal.SIGSTOP, set())
    ranks = ranks_of(process)
    process.send_signal(signal.SIGINT)
    time.sleep(3)
    assert process.poll() is None, "it waits for its ranks to stop"
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == 130
    assert not any(_alive(rank) for rank in ranks.values())


def test_torchrun_starts_a_run_again_that_resumes_by_itself(
    recipe: Path, undisturbed: Path, tmp_path: Path, started: list[Run]
) -> None:
    out = tmp_path / "out"
    process = torchrun(recipe, out, restarts=2)
    started.append(process)
    first = strike(process, out, 1, 9, signal.SIGKILL, set())
    strike(process, out, 0, 20, signal.SIGKILL, {first.pid})
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    assert said.count("Resuming from") == 2, said
    assert outcome(out, STEPS) == outcome(undisturbed, STEPS)


def test_torchrun_repeats_no_message_of_what_would_fail_again(recipe: Path, tmp_path: Path) -> None:
    process = torchrun(recipe, tmp_path / "out", "optimizer.lr=0", restarts=2)
    said, _ = process.communicate(timeout=240)
    assert process.returncode != 0
    assert said.count("error: ") == 1, said
    assert "exitcode  : 2" in said
    assert not (tmp_path / "out").exists()


def test_ranks_that_cannot_be_kept_are_done_without(
    recipe: Path, undisturbed: Path, tmp_path: Path, started: list[Run]
) -> None:
    out = tmp_path / "out"
    process = command(recipe, out, "--restarts", "0", nproc="1:2")
    started.append(process)
    strike(process, out, 1, 9, signal.SIGKILL, set())
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert "continuing from the last checkpoint with 1 ranks instead of 2" in said
    assert "layout.ddp 2 → 1" in said
    ours, theirs = outcome(out, STEPS)[0], outcome(undisturbed, STEPS)[0]
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
