"""Techniques that fail on ranks: the message comes once, from whoever it happened to, and only an outage is tried again."""

from __future__ import annotations

from pathlib import Path

import pytest

from rush.errors import RankLost
from rush.records.checkpoint_store import verify
from rush.records.run_folder import RunFolder
from tests.fresh_cache import fresh_cache
from tests.parallel.fault_work import Fault
from tests.parallel.fault_work import train as forked
from tests.training.small_runs import rows, rush, small_recipe, write_corpus

TESTS = Path(__file__).resolve().parents[1]
STEPS = 5


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("failing")
    often = {"validate_every": 2, "sample_every": 0}
    text = small_recipe(write_corpus(folder / "corpus"), schedule={"steps": STEPS, "warmup": 1}, run=often)
    (folder / "small.toml").write_text(text)
    return folder / "small.toml"


def train(
    recipe: Path, out: Path, techniques: str, file: Path, *words: str, launched: bool = True
) -> tuple[int, str]:
    """Two ranks, `launched` by the command line or, in a fraction of the time, forked."""
    line = [recipe, f"techniques=[{techniques}]", "--technique", file, "layout.ddp=2", "--out", out, *words]
    cache = recipe.parent / "cache"
    if launched:
        done = rush("train", *line, "--nproc", "2", cache=cache)
        code, said = done.returncode, done.stdout + done.stderr
    else:
        ended = forked(line, out.with_suffix(".log"), more={"RUSH_CACHE": str(fresh_cache(cache))})
        code, said = 4 if 4 in ended.codes else max(ended.codes), ended.said
    assert "Traceback" not in said
    return code, said


# By test_faults.py such a failure is not started again, by training/test_failures.py the message is whole, and the test below
# sees that one rank alone reports.
@pytest.mark.slow
def test_where_all_ranks_fail_rank_0_reports_it_once_and_nothing_is_restarted(
    recipe: Path, tmp_path: Path
) -> None:
    out, file = tmp_path / "run", TESTS / "cli" / "failing" / "under_no_grad.py"
    code, said = train(recipe, out, "'under_no_grad'", file)
    assert code == 4, said
    assert said.count(" failed with ") == 1, said
    assert said.count("error:") + said.count("error on") == 1, said
    assert "error: the validation after step 2 failed with TypeError: planted under no_grad." in said
    assert f"`rush train --out {out} --resume --nproc 2 --technique {file}`" in said
    assert "restarting all ranks" not in said
    assert verify(RunFolder(out).checkpoints.path(1)).step == 1, "the save that was under way came to its end"
    log = (out / "failure.log").read_text()
    assert "at: the validation after step 2 on rank 0 of 2" in log


@pytest.mark.parametrize("launched", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_where_one_rank_fails_it_reports_itself_and_the_others_exit_silently(
    launched: bool, recipe: Path, tmp_path: Path
) -> None:
    out, file = tmp_path / "run", TESTS / "lab" / "planted" / "on_rank_one.py"
    code, said = train(recipe, out, "{name='on_rank_one', kind='raises'}", file, launched=launched)
    assert code == 4, said
    assert said.count(" failed with ") == 1, said
    assert said.count("error:") + said.count("error on") == 1, said
    assert (
        "error on rank 1: the build failed with ValueError: planted on rank 1. The code of the technique on_rank_one ("
        in said
    )
    assert "restarting all ranks" not in said


def test_where_rank_0_fails_alone_it_stays_until_the_others_know(recipe: Path, tmp_path: Path) -> None:
    """It hosts the store: without it the others would report that they lost it, each with torch's stack."""
    out, cache = tmp_path / "run", fresh_cache(recipe.parent / "cache")
    line = [recipe, "layout.ddp=2", "run.timeout_s=30.0", "--out", out]
    fault = Fault("crashed", 0, 3)
    ended = forked(line, tmp_path / "log", fault=fault, more={"RUSH_CACHE": str(cache)})
    assert ended.codes == [1, RankLost.exit_code], ended.said
    assert ended.said.count("error") == 1, ended.said
    assert "failed with ValueError: a bug in a rank." in ended.said
    assert "TCPStore" not in ended.said


@pytest.mark.slow
def test_a_device_error_is_reported_and_the_ranks_restart(recipe: Path, tmp_path: Path) -> None:
    text = (TESTS / "cli" / "failing" / "in_forward.py").read_text()
    file = tmp_path / "device.py"
    file.write_text(
        text.replace("planted in forward", "CUDA error: an illegal memory access was encountered")
    )
    code, said = train(recipe, tmp_path / "run", "'in_forward'", file, "--restarts", "1")
    assert code == 0, said
    assert (
        "error: step 5 failed with RuntimeError: CUDA error: an illegal memory access was encountered."
        in said
    )
    assert said.count("restarting all ranks") == 1, said
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, STEPS + 1))
