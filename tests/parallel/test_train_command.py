"""`rush train` on several ranks, as a user starts it: what is written, how it stops, and that nobody is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from rush.cli.train import start_ranks
from rush.errors import RecipeError
from rush.hub.folders import read_weights
from rush.recipe_io import load_recipe
from rush.training.loop import resumed_recipe, train_recipe
from tests.fresh_cache import fresh_cache
from tests.parallel.fault_work import train
from tests.training.small_runs import ROOT, environment, rows, rush, small_recipe, write_corpus

Run = subprocess.Popen[str]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(small_recipe(write_corpus(tmp_path / "corpus"), schedule={"steps": 8, "warmup": 2}))
    return path


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[Run]]:
    processes: list[Run] = []
    yield processes
    for process in processes:
        for left in [*children(process), process]:
            if left.poll() is None if isinstance(left, subprocess.Popen) else left.is_running():
                left.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def start(started: list[Run], recipe: Path, out: Path, *words: str) -> Run:
    """A long run on two ranks, returned once it has made a step."""
    command = [sys.executable, "-m", "rush", "train", str(recipe), "schedule.steps=100000", "run.save_every=0",
               "layout.ddp=2", "--nproc", "2", "--out", str(out), *words]  # fmt: skip
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(out.parent / "cache"),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    started.append(process)
    until(lambda: bool(rows(out)) or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0]
    return process


def until(happened: Any, limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def children(process: Run) -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def same(ours: list[dict[str, Any]], reference: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in ours] == [row["step"] for row in reference]
    for mine, theirs in zip(ours, reference, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert mine[key] == pytest.approx(value, rel=1e-5), (mine["step"], key)


@pytest.mark.parametrize("axis", ["fsdp", pytest.param("cp", marks=pytest.mark.slow)])
def test_two_ranks_write_one_run_that_one_rank_resumes(
    axis: str, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(tmp_path / "cache")))
    train_recipe(load_recipe(str(recipe)), tmp_path / "one")
    out = tmp_path / "two"
    # Ranks that a launcher starts are in the test of stopping, below.
    ended = train(
        [recipe, f"layout.{axis}=2", "--out", out],
        tmp_path / "log",
        more={"RUSH_CACHE": str(tmp_path / "cache")},
    )
    assert ended.codes == [0, 0], ended.said
    assert ended.said.count("Done at step 8") == 1, "rank 0 alone speaks"
    same(rows(out), rows(tmp_path / "one"))
    assert rows(out, "samples.jsonl") == rows(tmp_path / "one", "samples.jsonl")
    # The last checkpoint is taken away; one rank goes on where two were, and ends where one would have.
    shutil.rmtree(out / "checkpoints" / "step-000008")
    train_recipe(load_recipe(str(out / "recipe.toml"), [f"layout.{axis}=1"]), out, resume=True)
    same(rows(out), rows(tmp_path / "one"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_run_in_cut_layers_resumes_on_one_rank_and_samples(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(tmp_path / "cache")))
    path = tmp_path / "small.toml"
    corpus = write_corpus(tmp_path / "corpus")
    path.write_text(small_recipe(corpus, family, schedule={"steps": 8, "warmup": 2}))
    train_recipe(load_recipe(str(path)), tmp_path / "one")
    out = tmp_path / "two"
    done = rush("train", path, "layout.tp=2", "--nproc", "2", "--out", out, cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    same(rows(out), rows(tmp_path / "one"))
    assert rows(out, "samples.jsonl") == rows(tmp_path / "one", "samples.jsonl")
    shutil.rmtree(out / "checkpoints" / "step-000008")
    train_recipe(load_recipe(str(out / "recipe.toml"), ["layout.tp=1"]), out, resume=True)
    same(rows(out), rows(tmp_path / "one"))
    said = rush("generate", out, "--prompt", "def", "--max-tokens", "4", cache=tmp_path / "cache")
    assert said.returncode == 0, said.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("layout.fsdp=2", "--nproc", "3"), "takes 2 ranks, but this run has 3"),
        pytest.param(("layout.ddp=2",), "takes 2 ranks, but this run has 1", marks=pytest.mark.slow),
        pytest.param(("--nproc", "2"), "every size of the layout is 1", marks=pytest.mark.slow),
        pytest.param(
            ("layout.tp=3", "--nproc", "3"), "layout.tp is 3, which does not divide", marks=pytest.mark.slow
        ),
    ],
)
def test_a_number_of_ranks_that_is_not_the_layouts_is_refused(
    words: tuple[str, ...], said: str, recipe: Path, tmp_path: Path
) -> None:
    done = rush("train", recipe, *words, "--out", tmp_path / "out", cache=tmp_path / "cache")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("error") == 1
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("nproc", "change", "said"),
    [
        ("3", "layout.tp=3", "does not divide the heads"),
        ("64", "layout.pp=64", "which takes 64 blocks"),
        ("3", "layout.cp=3", "does not divide into 6 equal chunks"),
    ],
)
def test_what_ranks_cannot_do_is_refused_before_any_is_started(
    nproc: str, change: str, said: str, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rush.parallel.launching.launch", lambda *_, **__: pytest.fail("ranks were started"))
    with pytest.raises(RecipeError, match=said):
        start_ranks(nproc, 0, str(recipe), [change], tmp_path / "out", resume=False, json=False)


@pytest.mark.slow
def test_under_torchrun_one_message_is_printed_and_all_ranks_exit(recipe: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "rush",
         "train", str(recipe), "layout.fsdp=4", "batch.micro=1", "--out", str(tmp_path / "out")],
        check=False, cwd=ROOT, env=environment(tmp_path / "cache"), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert time.monotonic() - began < 60
    assert done.returncode != 0
    assert done.stderr.count("error: layout.fsdp is 4, which takes 4 ranks, but this run has 2") == 1
    assert "exitcode  : 2" in done.stderr


@pytest.mark.parametrize(
    "layout", [(), pytest.param(("layout.ddp=1", "layout.pp=2"), marks=pytest.mark.slow)]
)
def test_ranks_that_are_asked_to_stop_end_after_the_same_step_with_a_checkpoint(
    layout: tuple[str, ...], recipe: Path, tmp_path: Path, started: list[Run]
) -> None:
    out = tmp_path / "out"
    process = start(started, recipe, out, *layout)
    ranks = children(process)
    assert len(ranks) == 2
    # One rank alone is asked: it tells the other.
    ranks[1].send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "Stopped at step" in said
    last = rows(out)[-1]["step"]
    assert [path.name for path in (out / "checkpoints").iterdir()] == [f"step-{last:06d}"]
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_launcher_that_is_asked_to_stop_stops_its_ranks(
    number: signal.Signals, recipe: Path, tmp_path: Path, started: list[Run]
) -> None:
    process = start(started, recipe, tmp_path / "out")
    process.send_signal(number)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "Stopped at step" in said
    assert "--resume --nproc 2" in said


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["a rank", "the launcher"])
def test_nobody_is_left_behind_a_killed_process(
    whom: str, recipe: Path, tmp_path: Path, started: list[Run]
) -> None:
    process = start(started, recipe, tmp_path / "out", "--restarts", "0")
    ranks = children(process)
    os.kill(ranks[1].pid if whom == "a rank" else process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    assert process.returncode != 0
    until(lambda: not any(rank.is_running() for rank in ranks), limit_s=30)
    if whom == "a rank":
        assert process.returncode == 128 + signal.SIGKILL
        assert process.stdout is not None
        said = process.stdout.read()
        assert "rank 1 was ended by SIGKILL; continue from the last checkpoint with --resume." in said


def test_a_run_resumes_with_another_layout_only_if_a_step_stays_what_it_was(recipe: Path) -> None:
    stored = load_recipe(str(recipe))
    assert resumed_recipe(stored, load_recipe(str(recipe), ["layout.ddp=2"])).layout.ddp == 2
    with pytest.raises(
        RecipeError, match=r"another recipe \(optimizer\.lr: .* → 0\.5\), which a resumed run may not change"
    ):
        resumed_recipe(stored, load_recipe(str(recipe), ["optimizer.lr=0.5", "run.keep=7"]))
    without = recipe.read_text().replace("total_tokens = 64\n", "")
    assert without != recipe.read_text()
    recipe.write_text(without)
    with pytest.raises(RecipeError, match="a step of the run was 32 tokens, with this layout it would be 64"):
        resumed_recipe(load_recipe(str(recipe)), load_recipe(str(recipe), ["layout.fsdp=2"]))


@pytest.mark.slow
def test_adapters_beside_a_base_in_parts_merge_and_export_as_any_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUSH_CACHE", str(fresh_cache(tmp_path / "cache")))
    path = tmp_path / "small.toml"
    path.write_text(
        small_recipe(write_corpus(tmp_path / "corpus"), family="llama", schedule={"steps": 8, "warmup": 2})
    )
    techniques = "techniques=[{name='qlora', rank=4}]"
    train_recipe(load_recipe(str(path), [techniques]), tmp_path / "one")
    out = tmp_path / "two"
    words = (techniques, "layout.fsdp=2", "--nproc", "2", "--out", out)
    done = rush("train", path, *words, cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    same(rows(out), rows(tmp_path / "one"))
    assert rows(out, "samples.jsonl") == rows(tmp_path / "one", "samples.jsonl")
    (_, merged), (_, wanted) = read_weights(out), read_weights(tmp_path / "one")
    assert merged.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.allclose(merged[name], value, atol=1e-6), name
    for folder in (out, tmp_path / "one"):
        done = rush("export", folder, "--adapter", "--to", f"{folder}-adapter", cache=tmp_path / "cache")
        assert done.returncode == 0, done.stderr
    ours, theirs = (
        load_file(f"{folder}-adapter/adapter_model.safetensors") for folder in (out, tmp_path / "one")
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], value, atol=1e-6) for name, value in theirs.items())
