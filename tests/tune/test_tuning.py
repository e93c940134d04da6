"""Real searches on this CPU: a folder with a recipe that trains, gone on with after a kill, never a trial twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from rush.cli import main
from rush.cli.tune import planned_parts, shortened, summary
from rush.errors import RecipeError
from rush.files import write_atomic
from rush.recipe_io import load_recipe
from rush.records.tune import CandidateRow, TuneRecord, mark, read_tune, short_names, tuned_on
from rush.report.tune import tune_page
from rush.techniques import Parity
from rush.tune.budget import seconds
from rush.tune.goal import Goal
from rush.tune.record import Request
from rush.tune.search import Doing
from rush.tune.tuning import tune

ROOT = Path(__file__).resolve().parents[2]
BREAKS = ROOT / "tests" / "lab" / "planted" / "breaks.py"
ALLOWED = frozenset({Parity.EXACT, Parity.CLOSE})


def request(recipe: Path, budget_s: float, **goal: object) -> Request:
    return Request("small", load_recipe(str(recipe)), Goal(**goal), ALLOWED, budget_s)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_search_of_seconds_leaves_a_recipe_its_evidence_and_no_process(
    small_recipe: Path, tmp_path: Path
) -> None:
    others = {child.pid for child in psutil.Process().children(recursive=True)}
    folder = tmp_path / "out"
    slow = load_recipe(str(small_recipe), ["techniques=['checkpoint_full']"])
    wide = load_recipe(str(small_recipe), ["batch.micro=7", "batch.total_tokens=7168"])
    with pytest.raises(RecipeError, match="the nearest allowed"):
        tune(replace(request(small_recipe, 6.0), beside={"wide": wide}), folder)
    assert not folder.exists(), "a mistake is told before anything starts"
    broken = load_recipe(str(small_recipe), ["techniques=['tf32']"])
    asked = replace(request(small_recipe, 6.0), beside={"slow": slow, "broken": broken})
    record = tune(asked, folder)
    assert record == read_tune(folder)
    assert record["winner"] is not None
    first, second = record["winner"]["beside"]
    assert [row["name"] for row in (first, second)] == ["slow", "broken"]
    assert [row["status"] for row in (first, second)] == ["ok", "unsupported"]
    low, high = first["gain"]["ci95"]
    assert low < record["winner"]["tokens_per_s"] / first["tokens_per_s"] < high
    assert f"{first['gain']['ratio']:.3f}× (" in summary(record)
    assert "broken could not be timed here: unsupported, technique tf32 cannot run here" in summary(record)
    assert "Beside recipes made by hand" in tune_page(record)
    assert record["finished"]
    assert record["load"] is not None
    assert [event["kind"] for event in record["events"]][:2] == ["rank", "reference"]
    found, start = load_recipe(str(folder / "recipe.toml")), load_recipe(str(small_recipe))
    assert found.step_tokens == start.step_tokens
    assert tuned_on(folder / "recipe.toml") == (record["fingerprint"], tuned_on(folder / "recipe.toml")[1])  # type: ignore[index]
    assert "<svg" in tune_page(record)
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in others]
    assert not [child for child in left if "python" in child.name()], "a trial is left"


# The search itself is rehearsed (test_rehearsal.py), and that such a life is found out is seen in lab/test_usable.py.
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_recipe_that_cannot_validate_is_passed_over_for_what_can(
    small_recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With real processes and a planted technique that only a validation breaks."""
    from rush.techniques.api.own_files import added

    with added([BREAKS]):
        techniques = 'techniques=[{name="breaks", kind="validate"}]'
        recipe = load_recipe(str(small_recipe), [techniques])
        asked = Request("small", recipe, Goal(), frozenset({Parity.EXACT}), 90.0)
        record = tune(asked, tmp_path, extra_techniques=[BREAKS])
        found = load_recipe(str(tmp_path / "recipe.toml"))
    assert not [name for name, _ in found.technique_uses() if name == "breaks"]
    winner = record["winner"]
    assert winner is not None
    assert winner["life"]["verdict"] == "ok", winner["life"]["problem"]
    passed = [row for row in record["candidates"] if row["state"] == "unusable" and row.get("life")]
    assert passed
    assert "breaks" in passed[0]["techniques"]
    assert passed[0]["reason"].startswith(
        "it cannot validate: the validation after step 2 failed with TypeError: planted"
    )
    assert "was rejected: it cannot validate" in summary(record)
    assert not (tmp_path / "work").exists()


def test_a_folder_of_another_search_is_refused(small_recipe: Path, tmp_path: Path) -> None:
    from rush.records.tune import write_tune

    write_tune(
        tmp_path / "tune.json",
        {"format": 1, "name": "other", "started": "", "machine": {}, "base": {"digest": "x"}, "candidates": [],
         "events": [], "objective": "tokens/s", "allowed": ["exact"]},
    )  # fmt: skip
    with pytest.raises(RecipeError, match="holds another search"):
        tune(request(small_recipe, 6.0), tmp_path)


def test_a_recipe_of_several_ranks_is_refused(small_recipe: Path, tmp_path: Path) -> None:
    two = Request("two", load_recipe(str(small_recipe), ["layout.ddp=2"]), Goal(), ALLOWED, 5.0)
    with pytest.raises(RecipeError, match="one device"):
        tune(two, tmp_path)


def test_the_mark_of_a_machine_is_read_back_and_changes_nothing(small_recipe: Path, tmp_path: Path) -> None:
    marked = tmp_path / "recipe.toml"
    write_atomic(marked, f"{mark('0123456789abcdef', 'a card (80 GiB)')}\n{small_recipe.read_text()}")
    assert tuned_on(marked) == ("0123456789abcdef", "a card (80 GiB)")
    assert tuned_on(small_recipe) is None
    assert load_recipe(str(marked)).digest == load_recipe(str(small_recipe)).digest


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--objective", "speed"], "--objective is 'speed'; allowed: tokens/s"),
        (["--objective", "cost"], "needs --price"),
        (["--budget", "soon"], "--budget is 'soon'"),
        (["--budget", "0m"], "--budget is '0m'"),
        (["--allow", "clos"], "did you mean 'close'"),
        (["--beside", "gpt2-124m-fast"], "--beside gpt2-124m-fast: the model is gpt2-124m"),
        (["--beside", "tiny batch.sequence=64"], "--beside tiny batch.sequence=64: batch.sequence is 64"),
        (["--beside", ""], "there is no recipe"),
    ],
)
def test_wrong_arguments_are_named_before_anything_starts(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["tune", "tiny", *words])
    assert left.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("load", [0.9, 3.0])
def test_a_busy_machine_is_reported(
    load: float,
    small_recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from rush.report import tune as report
    from rush.tune import tuning

    winner = {"as_it_stood": True, "parity": None}
    monkeypatch.setattr(tuning, "tune", lambda *rest, **options: {"winner": winner, "load": load})
    monkeypatch.setattr(report, "write_tune_report", lambda *rest: None)
    with pytest.raises(SystemExit):
        main(["tune", str(small_recipe), "--out", str(tmp_path)])
    assert ("Other processes ran on this machine" in capsys.readouterr().err) == (load > 1)


def test_lengths_of_time() -> None:
    assert [seconds(text) for text in ("90s", "20m", "1.5h", "30")] == [90, 1200, 5400, 30]


def _start(
    recipe: Path, folder: Path, budget: str, *more: str, stdout: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    words = [
        sys.executable,
        "-m",
        "rush",
        "tune",
        str(recipe),
        "--budget",
        budget,
        "--out",
        str(folder),
        *more,
    ]
    return subprocess.Popen([*words, "--allow", "exact", "--allow", "close"], cwd=ROOT, stdout=stdout)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_search_resumes_and_its_recipe_trains(small_recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    process = _start(small_recipe, folder, "120s", "--json")
    until = time.monotonic() + 240
    while len(list((folder / "trials").glob("*.json"))) < 4 and time.monotonic() < until:
        time.sleep(0.2)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {path.name: path.read_bytes() for path in (folder / "trials").glob("*.json")}
    assert len(before) >= 4
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive, "trials outlived the search"
    assert not (folder / "recipe.toml").exists()
    gone_on = _start(small_recipe, folder, "120s", stdout=subprocess.PIPE)
    said = gone_on.communicate(timeout=400)[0].decode()
    assert gone_on.returncode == 0
    assert "unchanged: known from before" in said
    record = read_tune(folder)
    for name, content in before.items():
        assert (folder / "trials" / name).read_bytes() == content, "a trial was repeated"
    assert record["winner"] is not None
    assert record["winner"]["parity"]["verdict"] == "equal"
    assert record["spent_s"] <= 130
    train = [
        sys.executable,
        "-m",
        "rush",
        "train",
        str(folder / "recipe.toml"),
        "--out",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(train, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "another machine" not in done.stderr
    moved = tmp_path / "moved.toml"
    moved.write_text((folder / "recipe.toml").read_text().replace(record["fingerprint"], "0" * 16))
    told = subprocess.run(
        [*train[:4], str(moved), "--out", str(tmp_path / "run2")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0
    assert told.stderr.count("tuned on another machine") == 1


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_interrupt_leaves_no_process(small_recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    process = _start(small_recipe, folder, "120s", "--json")
    until = time.monotonic() + 240
    while not list((folder / "trials").glob("*.json")) and time.monotonic() < until:
        time.sleep(0.2)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=30) == 130
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_longest_sequence_is_at_most_the_models_context(small_recipe: Path, tmp_path: Path) -> None:
    record = tune(request(small_recipe, 240.0, objective="longest-sequence"), tmp_path / "out")
    assert record["winner"] is not None
    found = load_recipe(str(tmp_path / "out" / "recipe.toml"))
    assert found.batch.sequence == record["winner"]["sequence"] == found.shape().context
    assert found.batch.micro == 1
    assert record["winner"]["parity"]["verdict"] == "equal"


def test_recipes_of_the_planner_get_names_that_fit_into_a_table() -> None:
    keys = ["as it stands", "planned: a + b(x=1) + c, micro 8", "planned: a + c, micro 8", "micro 16"]
    keys += ["planned: a + b(x=1) + c + d, micro 4", "planned: e + f + g + h, micro 8", "a"]
    rows: list[CandidateRow] = [{"key": key} for key in keys]
    assert list(map(str, short_names(rows).values())) == [
        "as it stands",
        "jump 1",
        "jump 2: jump 1 without b(x=1)",
        "micro 16",
        "jump 3: jump 1 with d, with micro 4",
        "jump 4",
        "a",
    ]
    told: list[CandidateRow] = [
        {"key": "one", "kind": "jump", "settings": ["a", "b(x=1)"], "micro": 8},
        {"key": "two", "kind": "jump", "settings": ["a"], "micro": 8},
        {"key": "a", "kind": "technique", "settings": ["a"], "micro": 8},
    ]
    assert list(map(str, short_names(told).values())) == ["jump 1", "jump 2: jump 1 without b(x=1)", "a"]
    record: TuneRecord = {"candidates": rows}
    assert shortened(record, Doing(keys[2], "prove", known=True)) == (
        "jump 2: jump 1 without b(x=1) (prove): known from before"
    )
    assert shortened(record, Doing("plain fp32", "reference")) == "plain fp32, for parity"
    assert dict(planned_parts(record)) == {
        "jump 1": "a + b(x=1) + c, micro 8",
        "jump 4": "e + f + g + h, micro 8",
    }
