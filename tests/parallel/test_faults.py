"""Ranks that are killed, stopped, crash, hang or drift: the run goes on to the same bits, or says what is wrong and who."""

from __future__ import annotations

import random
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from rush.errors import RankLost, RecipeError
from rush.parallel import launching
from rush.parallel.launching import launch
from rush.parallel.replica_check import describe
from rush.recipe_io import load_recipe
from rush.training.fewer_ranks import changes, fewer_ranks, shrunk
from tests.fresh_cache import fresh_cache
from tests.parallel.fault_work import Ended, Fault, train
from tests.training.small_runs import TIMES, rows, small_recipe, write_corpus

STEPS = 16
LOST = RankLost.exit_code


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    path = folder / "small.toml"
    settings = {"save_every": 3, "drift_every": 1, "timeout_s": 60.0, "sample_tokens": 0}
    path.write_text(
        small_recipe(write_corpus(folder / "corpus"), schedule={"steps": STEPS, "warmup": 2}, run=settings)
    )
    return path


@pytest.fixture(scope="module")
def undisturbed(recipe: Path) -> Path:
    out = recipe.parent / "undisturbed"
    ended = go(recipe, out)
    assert ended.codes == [0, 0], ended.said
    return out


def go(recipe: Path, out: Path, *words: str, layout: str = "ddp", **how: Any) -> Ended:
    said = [recipe, f"layout.{layout}=2", "--out", out, *words]
    cache = {"RUSH_CACHE": str(fresh_cache(recipe.parent / "cache"))}
    return train(said, out.with_suffix(".log"), more={**cache, **how.pop("more", {})}, **how)


def outcome(out: Path, step: int = STEPS) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """What a run comes to, without the times: its rows and the bytes of its last checkpoint."""
    folder = out / "checkpoints" / f"step-{step:06d}"
    tensors = {path.name: path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))}
    assert tensors
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows(out)], tensors


@pytest.mark.slow
def test_a_run_whose_ranks_are_killed_at_random_steps_ends_with_the_same_bits(
    recipe: Path, undisturbed: Path, tmp_path: Path
) -> None:
    seed = 20261115
    dice, out = random.Random(seed), tmp_path / "killed"
    steps = [1, dice.randrange(2, STEPS)]  # the first before anything was saved
    for step in steps:
        fault = Fault(dice.choice(["killed", "crashed"]), dice.randrange(2), step)
        print(f"seed {seed}: {fault}")  # noqa: T201
        ended = go(recipe, out, "--resume", fault=fault)
        assert ended.codes[fault.rank] == (-9 if fault.kind == "killed" else 1), ended.said
        assert ended.codes[1 - fault.rank] == LOST, ended.said
        assert "lost the connection" in ended.said
    assert go(recipe, out, "--resume").codes == [0, 0]
    assert outcome(out) == outcome(undisturbed)


def test_a_rank_that_does_not_come_is_named_with_the_collective_and_the_step(
    recipe: Path, tmp_path: Path
) -> None:
    ended = go(recipe, tmp_path / "asleep", "run.timeout_s=6", fault=Fault("asleep", 1, 5))
    assert ended.codes == [LOST, LOST], ended.said
    assert ended.said.count("error") == 1, ended.said
    message = ended.said[ended.said.index("error") :]
    assert "rank 0 has waited 6 s (run.timeout_s) at step 5 for all_reduce of 5 double" in message
    assert "in _sum_counts (rush/training/step.py" in message
    assert "rank 1 did not join it, it is at step 5 in _start (rush/training/session.py" in message
    assert not any(row["step"] > 4 for row in rows(tmp_path / "asleep"))


def test_a_flipped_bit_on_one_rank_stops_the_run_and_is_not_saved(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "flipped"
    ended = go(recipe, out, fault=Fault("flipped bit", 1, 9))
    assert ended.codes == [5, 5], ended.said
    assert ended.said.count("error") == 1, ended.said
    assert (
        "step 9: replicas of the weights have drifted apart: ranks 0, 1 do not hold the same bits of"
        in ended.said
    )
    assert "blocks.1.mlp.up.weight" in ended.said
    assert f"the last good checkpoint is {out / 'checkpoints' / 'step-000006'}" in ended.said
    assert not (out / "checkpoints" / "step-000009").exists()


def test_of_three_replicas_the_odd_one_is_named() -> None:
    assert "rank 2 holds other bits than the 3 others of w." in describe(7, "w", {0: 5, 1: 5, 2: 6, 3: 5}, 1)
    assert "ranks 0, 3 hold other bits than the 3 others of w, and 1 more" in describe(
        7, "w", {0: 5, 1: 6, 2: 6, 3: 7, 4: 6}, 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_run_continues_on_fewer_ranks_and_learns_the_same(
    layout: str, recipe: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / layout
    go(recipe, out, layout=layout, fault=Fault("killed", 1, 8))
    refused = go(recipe, out, "--resume", layout=layout, world=1)
    assert refused.codes == [2]
    assert "takes 2 ranks, but this run has 1" in refused.said
    ended = go(recipe, out, "--resume", "--shrink", layout=layout, world=1)
    assert ended.codes == [0], ended.said
    assert f"1 ranks instead of 2: layout.{layout} 2 → 1; the samples of a step stay" in ended.said
    for mine, theirs in zip(rows(out), rows(undisturbed), strict=True):
        for key in ("step", "loss", "tokens", "labels", "lr"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-5), (mine["step"], key)


def test_layouts_shrink_in_ddp_first_and_only_where_a_step_divides(recipe: Path) -> None:
    def of(*words: str) -> Any:
        return load_recipe(str(recipe), ["batch.micro=1", "batch.total_tokens=128", *words])

    assert shrunk(of("layout.ddp=4", "layout.fsdp=2"), 4).layout.model_dump() == {
        "ddp": 2, "fsdp": 2, "tp": 1, "pp": 1, "cp": 1
    }  # fmt: skip
    assert shrunk(of("layout.fsdp=8"), 2).layout.fsdp == 2
    assert shrunk(of("layout.ddp=2", "layout.fsdp=2"), 1).layout.model_dump() == {
        "ddp": 1, "fsdp": 1, "tp": 1, "pp": 1, "cp": 1
    }  # fmt: skip
    assert shrunk(of("layout.ddp=2", "layout.tp=2"), 2).layout.tp == 2
    with pytest.raises(RecipeError, match=r"numbers of ranks that are possible: 2, 4\."):
        shrunk(of("layout.ddp=2", "layout.tp=2"), 3)
    with pytest.raises(RecipeError, match="possible: 1, 2, 4, 8"):
        shrunk(of("layout.ddp=8"), 7)
    assert fewer_ranks(of("layout.ddp=8"), 8, 1) == 4
    assert fewer_ranks(of("layout.ddp=8"), 4, 3) is None
    before = load_recipe(str(recipe), ["layout.ddp=2"])
    assert "layout.ddp 2 → 1" in changes(before, shrunk(before, 1))
    # A step that grew with the ranks stays what it was.
    text = recipe.read_text().replace("total_tokens = 64\n", "")
    other = recipe.with_name("without.toml")
    other.write_text(text)
    assert shrunk(load_recipe(str(other), ["layout.ddp=2"]), 1).step_tokens == 64


FAKE = """#!{python} -S
import os, signal, sys, time
rank, folder = int(os.environ["RANK"]), "{folder}"
tries = len([name for name in os.listdir(folder) if name.startswith(f"try-{{rank}}-")])
world = os.environ["WORLD_SIZE"]
with open(f"{{folder}}/.{{rank}}", "w") as told:
    told.write(world + " " + " ".join(sys.argv[1:]))
os.rename(f"{{folder}}/.{{rank}}", f"{{folder}}/try-{{rank}}-{{tries}}")
while not all(os.path.exists(f"{{folder}}/try-{{other}}-{{tries}}") for other in range(int(world))):
    time.sleep(0.01)
{what}
"""
"""Ranks wait for each other before they do anything: on a busy machine one could end before another has begun."""


def fake_ranks(monkeypatch: pytest.MonkeyPatch, folder: Path, what: str) -> Path:
    """Let the launcher start something quick in the place of Python with our package."""
    python, tries = folder / "python", folder / "tries"
    tries.mkdir()
    python.write_text(FAKE.format(python=sys.executable, folder=tries, what=what))
    python.chmod(0o755)
    monkeypatch.setattr(launching.sys, "executable", str(python))
    return tries


def told(tries: Path, rank: int) -> list[str]:
    return [path.read_text() for path in sorted(tries.glob(f"try-{rank}-*"))]


@pytest.mark.parametrize("code", [5, *(pytest.param(code, marks=pytest.mark.slow) for code in (2, 3, 4))])
def test_what_would_fail_again_is_not_started_again(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = fake_ranks(monkeypatch, tmp_path, f"sys.exit({code}) if rank == 1 else time.sleep(60)")
    assert launch(2, ["train"], restarts=3) == code
    assert len(told(tries, 1)) == 1


def test_a_killed_rank_is_started_again_with_resume_until_nothing_new_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tries = fake_ranks(monkeypatch, tmp_path, "os.kill(os.getpid(), 9) if rank == 1 else time.sleep(60)")
    saved = iter([[], [3], [6], [6], [6]])
    assert launch(2, ["train", "tiny"], restarts=2, last_checkpoint=lambda: next(saved)) == 137
    said = capfd.readouterr().err
    assert said.count("rank 1 was ended by SIGKILL; restarting all ranks") == 3
    assert "2 restarts in a row brought no new checkpoint, so the run ends" in said
    assert told(tries, 0) == ["2 -m rush train tiny", *["2 -m rush train tiny --resume"] * 3]


@pytest.mark.slow
def test_a_run_continues_on_fewer_ranks_when_restarts_do_not_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tries = fake_ranks(monkeypatch, tmp_path, "sys.exit(1 if world == '4' and rank == 3 else 0)")
    assert launch(4, ["train"], restarts=1, fewer=lambda world: world // 2) == 0
    assert [line.split()[0] for line in told(tries, 0)] == ["4", "4", "2"]
    said = capfd.readouterr().err
    assert (
        "rank 3 failed with exit code 1; continuing from the last checkpoint with 2 ranks instead of 4"
        in said
    )


def test_one_rank_with_another_recipe_is_refused_by_all_with_one_message(
    recipe: Path, tmp_path: Path
) -> None:
    other = [recipe, "layout.ddp=2", "optimizer.lr=0.5", "--out", tmp_path / "out"]
    ended = go(recipe, tmp_path / "out", words_of={1: other})
    refused(ended, 2, "1 of 2 ranks differ from rank 0, which has the recipe")
    assert ended.said.count("rush 0") == 2, "both are named"
    # One whose layout takes another number of ranks does not even come, but rank 0 hears why.
    other = [recipe, "layout.ddp=4", "batch.micro=1", "--out", tmp_path / "out"]
    ended = go(recipe, tmp_path / "out", words_of={1: other})
    refused(ended, 2, "error: rank 1: layout.ddp is 4, which takes 4 ranks, but this run has 2")


@pytest.mark.slow
@pytest.mark.parametrize("answers", [False, True])
def test_a_port_in_use_is_reported_once_and_all_ranks_exit(
    answers: bool, recipe: Path, tmp_path: Path
) -> None:
    with socket.socket() as foreign:
        foreign.bind(("127.0.0.1", 0))
        foreign.listen()
        taken = {"MASTER_PORT": str(foreign.getsockname()[1])}
        if answers:
            import threading

            def hang_up() -> None:
                while True:
                    try:
                        foreign.accept()[0].close()
                    except OSError:
                        return

            threading.Thread(target=hang_up, daemon=True).start()
        ended = go(recipe, tmp_path / "out", more=taken)
    refused(ended, 4, "error: rank 0 cannot listen at port")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("layout.tp=3", "error: layout.tp is 3, which does not divide the heads"),
        pytest.param(
            "layout.pp=3", "error: layout.pp is 3 with 1 stage on each rank", marks=pytest.mark.slow
        ),
        pytest.param(
            "layout.cp=3", "error: batch.sequence is 16, which layout.cp = 3", marks=pytest.mark.slow
        ),
        pytest.param("layout.ddp=2", "error: layout.ddp is 2, which takes 2 ranks", marks=pytest.mark.slow),
    ],
)
def test_a_layout_that_cannot_be_is_refused_once_by_three_ranks(
    word: str, said: str, recipe: Path, tmp_path: Path
) -> None:
    words = [recipe, word, "batch.micro=1", "--out", tmp_path / "out"]
    cache = {"RUSH_CACHE": str(fresh_cache(recipe.parent / "cache"))}
    ended = train(words, tmp_path / "log", world=3, more=cache)
    assert ended.codes == [2, 2, 2], ended.said
    assert ended.said.count("error") == 1, ended.said
    assert said in ended.said
    assert ended.seconds < 30


def refused(ended: Ended, code: int, said: str) -> None:
    assert ended.codes == [code, code], ended.said
    assert said in ended.said
    assert ended.said.count("error") == 1, ended.said
    assert ended.seconds < 30


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["asleep", "stopped"])
def test_of_three_ranks_only_the_late_one_is_named(kind: str, recipe: Path, tmp_path: Path) -> None:
    sizes = ["layout.ddp=3", "batch.micro=1", "batch.total_tokens=48", "run.timeout_s=12"]
    said = [recipe, *sizes, "--out", tmp_path / "out"]
    cache = {"RUSH_CACHE": str(fresh_cache(recipe.parent / "cache"))}
    ended = train(said, tmp_path / "log", world=3, fault=Fault(kind, 2, 5), more=cache)
    assert ended.codes == [LOST, LOST, LOST if kind == "asleep" else -9], ended.said
    assert ended.said.count("error:") == 1, ended.said
    assert ended.said.count("did not join it") == 1, ended.said
    assert "rank 2 did not join it" in ended.said
    assert ("it is stopped" in ended.said) == (kind == "stopped")


@pytest.mark.slow
def test_a_rank_killed_while_it_saves_leaves_the_last_checkpoint_as_it_was(
    recipe: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ended = go(recipe, out, fault=Fault("killed in a save", 0, 9))
    assert ended.codes == [-9, LOST], ended.said
    assert not (out / "checkpoints" / "step-000009").exists()
    assert (out / "checkpoints" / "step-000006").exists()
    assert go(recipe, out, "--resume").codes == [0, 0]
    assert outcome(out) == outcome(undisturbed)
