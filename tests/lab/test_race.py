"""Real races of tiny models: killed and resumed, and the recipe that is faster and learns less."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import rush
from rush.errors import DataError, MachineError, RecipeError
from rush.lab.race import legs
from rush.lab.race.contenders import read_contenders
from rush.lab.race.race_plan import RacePlan, plan_race
from rush.lab.race.racing import race
from rush.records.metrics import MetricsRow, read_rows
from rush.records.race import read_race
from rush.report.redraw import page_of
from tests.lab.lab_fixtures import Lent

WORSE = ["model.shape.num_layers=1", "optimizer.lr=1e-5"]
"""Steps of a fifth of the work, which teach almost nothing."""


@pytest.fixture(autouse=True)
def lent(starter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legs, "Starter", lambda *given, **options: Lent(starter))


def plan_of(recipe: Path, *words: str, **options: Any) -> RacePlan:
    shared = ["schedule.warmup=2", "optimizer.lr=1e-2", "model.shape.num_layers=6"]
    return plan_race(read_contenders([*shared, str(recipe), str(recipe), *words]), **options)


def test_a_worse_learning_rate_with_faster_steps_wins_gross_and_loses_net(
    tmp_path: Path, small_recipe: Path
) -> None:
    plan = plan_of(small_recipe, *WORSE, tokens=64 * 24, points=6, legs=2)
    record = race(plan, tmp_path / "race")
    (finding,) = record["findings"]
    assert finding["gross"] is not None
    assert finding["net"] is not None
    assert finding["gross"]["ratio"] > 1.2
    assert finding["net"]["ratio"] < 1
    assert finding["more_tokens"] is not None
    assert finding["more_tokens"]["ratio"] > 1.5
    assert finding["gaps"][-1]["gap"] > 0
    for run in record["runs"]:
        files = tmp_path / "race" / "runs" / f"{run['contender']}-{run['seed']}"
        rows = list(read_rows(files / "metrics.jsonl", MetricsRow))
        assert [row["step"] for row in rows] == list(range(1, 25))
        assert run["step_s"] == pytest.approx([row["step_s"] for row in rows], rel=1e-5)
        assert [one["tokens"] for one in run["validations"]] == [256 * k for k in range(1, 7)]
        assert run["status"] == "ok"
    assert {leg["place"] for run in record["runs"] for leg in run["legs"]} == {0, 1, 2, 3}
    assert "later than A" in page_of(tmp_path / "race") or "With one seed" in page_of(tmp_path / "race")
    again = race(plan, tmp_path / "race")
    assert again["runs"] == record["runs"], "a finished race measures nothing again"


@pytest.mark.slow
def test_a_race_in_a_folder_is_the_same_race_or_refused(tmp_path: Path, small_recipe: Path) -> None:
    folder = tmp_path / "race"
    plan = plan_of(small_recipe, tokens=64 * 8, points=4, legs=1)
    before = race(plan, folder)
    with pytest.raises(RecipeError, match="holds another race: --tokens differ"):
        race(plan_of(small_recipe, tokens=64 * 16, points=4, legs=1), folder)
    with pytest.raises(RecipeError, match="holds another race: the recipes differ"):
        race(plan_of(small_recipe, *WORSE, tokens=64 * 8, points=4, legs=1), folder)
    two = race(plan_of(small_recipe, tokens=64 * 8, points=4, legs=1, seeds=2), folder)
    assert [run for run in two["runs"] if run["seed"] == before["seeds"][0]] == before["runs"]
    assert len(two["findings"][0]["net"]["samples"]) == 2  # type: ignore[index]
    with pytest.raises(RecipeError, match="seeds can be added, not taken away"):
        race(plan, folder)
    tree = json.loads((folder / "race.json").read_text())
    tree["machine"]["torch"] = "1.0"
    (folder / "race.json").write_text(json.dumps(tree))
    with pytest.raises(MachineError, match="begun on another machine, or with other versions"):
        race(plan_of(small_recipe, tokens=64 * 8, points=4, legs=1, seeds=2), folder)


@pytest.mark.slow
def test_a_diverged_contender_is_a_result_and_a_lost_checkpoint_is_said(
    tmp_path: Path, small_recipe: Path
) -> None:
    wild = ["optimizer.lr=1e30", "optimizer.clip=0"]
    record = race(plan_of(small_recipe, *wild, tokens=64 * 8, points=4, legs=2), tmp_path / "wild")
    statuses = {run["contender"]: run["status"] for run in record["runs"]}
    assert statuses == {"A": "ok", "B": "diverged"}
    assert record["why_ended"] == "fewer than two contenders came to the end"
    assert "diverged" in page_of(tmp_path / "wild")
    plan = plan_of(small_recipe, tokens=64 * 8, points=4, legs=2)
    record = race(plan, tmp_path / "lost")
    tree = json.loads((tmp_path / "lost" / "race.json").read_text())
    tree["runs"][0]["status"] = "running"
    (tmp_path / "lost" / "race.json").write_text(json.dumps(tree))
    for checkpoint in (tmp_path / "lost" / "runs" / "A-1337" / "checkpoints").glob("step-*"):
        checkpoint.rename(tmp_path / checkpoint.name)
    with pytest.raises(DataError, match="has no checkpoint of step 8"):
        race(plan, tmp_path / "lost")


@pytest.mark.parametrize(
    ("codes", "status"),
    [([-9], "killed"), ([75, -9], "killed"), ([0, 130], "killed"), ([2], "failed"), ([75, 2], "failed"), ([5, 75], "diverged")],
)  # fmt: skip
def test_ranks_that_miss_a_killed_one_are_tried_again_and_a_failure_of_their_own_is_not(
    codes: list[int], status: str
) -> None:
    assert legs._ending(codes, "error: something")[0] == status


@pytest.mark.slow
def test_two_ranks_race_with_one_and_learn_the_same_while_the_batch_grows(
    tmp_path: Path, small_recipe: Path
) -> None:
    shared = ["schedule.warmup=2", "batch.total_tokens=256", "batch.schedule=[{tokens=128,until=0.5}]"]
    contenders = read_contenders([*shared, str(small_recipe), str(small_recipe), "layout.fsdp=2"])
    record = race(plan_race(contenders, tokens=256 * 8, points=4, legs=2), tmp_path / "race=2")
    assert [(run["status"], run["reason"]) for run in record["runs"]] == [("ok", None)] * 2
    alone, both = (run["losses"] for run in record["runs"])
    assert both == pytest.approx(alone, rel=1e-5)
    assert [run["tokens"] for run in record["runs"]] == [[128] * 6 + [256] * 5] * 2


@pytest.mark.slow
def test_until_a_loss_a_run_stops_where_it_reached_it(tmp_path: Path, small_recipe: Path) -> None:
    plan = plan_of(small_recipe, *WORSE, tokens=64 * 24, points=6, legs=3, loss=5.6)
    record = race(plan, tmp_path / "race")
    by_letter = {run["contender"]: run for run in record["runs"]}
    assert by_letter["A"]["status"] == "reached"
    assert len(by_letter["A"]["step_s"]) < 24
    assert by_letter["B"]["status"] == "ok"
    assert record["depths"][-1]["tokens"]["B"] is None


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 3.0, 6.0, 9.0])
def test_a_race_killed_at_any_moment_goes_on_and_measures_nothing_twice(
    tmp_path: Path, small_recipe: Path, seconds: float
) -> None:
    folder = tmp_path / "race"
    words = ["schedule.warmup=2", str(small_recipe), str(small_recipe), "optimizer.lr=1e-2"]
    options = ["--tokens", str(64 * 60), "--points", "6", "--legs", "6", "--out", str(folder)]
    command = [sys.executable, "-m", "rush", "race", *words, *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 120
    while not list(folder.glob("runs/A-1337/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    known = read_race(folder) if (folder / "race.json").exists() else None
    if known is not None:
        assert "race" in page_of(folder)
    record = rush.race(*words, tokens=64 * 60, points=6, legs=6, out=folder).record
    whole = rush.race(*words, tokens=64 * 60, points=6, legs=6, out=tmp_path / "whole").record
    for run, undisturbed in zip(record["runs"], whole["runs"], strict=True):
        assert run["losses"] == undisturbed["losses"], "to the same bits"
        assert run["validations"] == undisturbed["validations"]
        assert [leg["last"] for leg in run["legs"]] == [leg["last"] for leg in undisturbed["legs"]]
    for before, run in zip(known["runs"] if known else [], record["runs"], strict=False):
        count = len(before["step_s"])
        assert run["step_s"][:count] == before["step_s"], "what was measured is not measured again"
