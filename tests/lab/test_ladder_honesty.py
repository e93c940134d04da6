"""The ladder's promises, with real processes and planted techniques."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rush.cli.ladder_table import caption_of
from rush.lab.ladder.climb import Climb, LadderProgress, climb
from rush.lab.ladder.findings import RESTLESS
from rush.lab.ladder.ladder_file import load_ladder
from rush.records.ladder import read_ladder

PLANTED = Path(__file__).parent / "planted"
PLANT, STEADY = PLANTED / "plant.py", PLANTED / "steady.py"
ROOT = Path(__file__).resolve().parents[2]
LadderFile = Callable[..., Path]


@pytest.fixture(name="no_lives")
def _no_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what a ladder's trials show: that rungs have lives is seen in test_usable.py."""
    monkeypatch.setattr(Climb, "_live", lambda self, state: None)


@pytest.fixture(name="sleep")
def _sleep() -> str:
    """The command that a planted technique leaves running when it hangs."""
    return f"sleep {os.environ['PLANTED_SLEEP']}"


def _plant(kind: str) -> str:
    return f'{{name = "plant", kind = "{kind}"}}'


@pytest.mark.usefixtures("no_lives")
def test_every_kind_of_failure_is_recorded_and_the_ladder_continues(
    ladder_file: LadderFile, tmp_path: Path, sleep: str
) -> None:
    kinds = ("nothing", "gradient", "memory", "hang", "segfault")
    path = ladder_file([*map(_plant, kinds), '"tf32"', '"fused_adamw"'], limit_s=20.0)
    record = climb(load_ladder(str(path)), tmp_path / "out", extra_techniques=[PLANT])
    rungs = {rung["name"]: rung for rung in record["rungs"]}
    verdicts = {kind: rungs[f"plant(kind={kind})"]["verdict"] for kind in kinds}
    assert verdicts == {
        "nothing": "no effect",
        "gradient": verdicts["gradient"],
        "memory": "out of memory",
        "hang": "timed out",
        "segfault": "crashed",
    }
    assert "different" in verdicts["gradient"]
    parity = rungs["plant(kind=gradient)"]["parity"]
    assert parity is not None
    assert parity["verdict"] == "different"
    assert abs(parity["worst_tensor"]["relative_error"] - 0.05) < 1e-3
    assert "SIGSEGV" in str(rungs["plant(kind=segfault)"]["reason"])
    assert "20 s" in str(rungs["plant(kind=hang)"]["reason"])
    assert rungs["tf32"]["status"] == "unsupported"
    assert "CUDA" in str(rungs["tf32"]["reason"])
    assert rungs["fused_adamw"]["kept"]
    assert not any(rungs[name]["kept"] for name in ("tf32", "plant(kind=hang)", "plant(kind=segfault)"))
    last = rungs["fused_adamw"]
    assert last["status"] == "ok"
    # The failures were left behind; the planted gradient, which ran, was built upon.
    assert last["techniques"] == ["plant", "fused_adamw"]
    assert last["gain"] is not None
    assert last["gain"]["over"] == "plant(kind=gradient)"
    assert _commands(sleep) == []
    assert read_ladder(tmp_path / "out") == record
    assert record["finished"] is not None
    assert record["drift"] is not None


# Equal rungs and rungs without a gain are in the tests around this one, too (test_liars.py, and the ladder of failures).
@pytest.mark.slow
def test_plain_techniques_are_equal_and_show_their_evidence(ladder_file: LadderFile, tmp_path: Path) -> None:
    path = ladder_file(['"fused_adamw"', '"flash_attention"', '{"batch.micro" = 4}'])
    record = climb(load_ladder(str(path)), tmp_path / "out")
    base, fused, flash, batch = record["rungs"]
    assert base["verdict"] == "baseline"
    for rung in (base, fused, flash, batch):
        assert rung["status"] == "ok", rung["reason"]
        assert rung["parity"] is not None
        assert rung["parity"]["verdict"] == "equal", rung["parity"]["why"]
        assert all(row["took_effect"] for row in rung["evidence"])
    assert base["parity"]["losses"] == base["parity"]["reference_losses"]
    assert batch["step_tokens"] == 2 * base["step_tokens"]
    assert batch["parity"]["losses"] == flash["parity"]["losses"]  # the batch of parity is the ladder's
    # The plain run, its twin, and a trace for each technique.
    assert len(list((tmp_path / "out" / "parity").glob("*.safetensors"))) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("no_lives")
def test_adapters_are_held_against_adapters_and_a_folder_may_travel_without_gradients(
    ladder_file: LadderFile, tmp_path: Path
) -> None:
    path, out = ladder_file(['{name = "lora", rank = 2}', '"fused_adamw"']), tmp_path / "out"
    record = climb(load_ladder(str(path)), out)
    plain, *adapted = record["rungs"]
    assert plain["parity"] is not None
    assert plain["parity"]["against"] == "plain fp32"
    for rung in adapted:
        assert rung["parity"] is not None
        assert rung["parity"]["against"] == "plain fp32 with lora"
        assert rung["parity"]["verdict"] == "not judged"
        assert ".adapter." in rung["parity"]["worst_tensor"]["name"]
        assert rung["parity"]["why"].startswith(
            "what is learned differs by design; compared with plain fp32 with lora"
        )
    assert any(within in adapted[1]["parity"]["why"] for within in ("the same bits", ", within the "))
    for file in out.glob("parity/*.safetensors"):
        file.unlink()
    again = climb(load_ladder(str(path)), out)
    assert [rung["parity"] for rung in again["rungs"]] == [rung["parity"] for rung in record["rungs"]]


@pytest.mark.slow
def test_the_longest_sequence_is_found_with_and_without_a_technique(
    ladder_file: LadderFile, tmp_path: Path
) -> None:
    """By real memory: attention that keeps its scores runs out of what a run may take long before one that does not."""
    wanted = [
        "search.sequence_up_to=4096",
        'search.sequence_with=["flash_attention"]',
        "run.memory_limit_gb=0.1",
    ]
    shape = [
        "model.shape.context=1024",
        "model.shape.num_heads=4",
        "model.shape.num_layers=2",
        "batch.micro=1",
    ]
    record = climb(load_ladder(str(ladder_file(['"fused_adamw"'])), [*wanted, *shape]), tmp_path / "out")
    assert record["sequence_limits"] is not None
    plain, flash = record["sequence_limits"]
    assert (plain["techniques"], flash["techniques"]) == (["fused_adamw"], ["fused_adamw", "flash_attention"])
    assert plain["longest"] < flash["longest"], (plain, flash)
    assert plain["ended_by"] == "memory"
    assert any(point["status"] == "out_of_memory" for point in plain["tried"])
    assert all(point["sequence"] > plain["longest"] for point in plain["tried"] if point["status"] != "ok")
    assert "the longest sequence with fused_adamw: " in str(caption_of(record))


@pytest.mark.slow
def test_three_views_and_the_search_for_a_batch_agree_on_what_was_measured(
    ladder_file: LadderFile, tmp_path: Path
) -> None:
    path, out = ladder_file(['"fused_adamw"', '{"batch.micro" = 4}']), tmp_path / "out"
    plan = load_ladder(str(path), ["search.batch_up_to=4"])
    whole = climb(plan, out, view="all")
    alone, left_out = read_ladder(out / "alone"), read_ladder(out / "left_out")
    assert [rung["name"] for rung in alone["rungs"]] == ["base", "fused_adamw", "batch.micro=4"]
    assert [rung["name"] for rung in left_out["rungs"]] == [
        "all",
        "without fused_adamw",
        "without batch.micro=4",
    ]
    # One recipe is one trial, whichever view asks for it.
    assert alone["rungs"][1]["tokens_per_s"] == whole["rungs"][1]["tokens_per_s"]
    assert left_out["rungs"][1]["tokens_per_s"] == alone["rungs"][2]["tokens_per_s"]
    assert left_out["rungs"][0]["digest"] == whole["rungs"][2]["digest"]
    assert whole["interactions"] is not None
    assert [row["technique"] for row in whole["interactions"]] == ["fused_adamw", "batch.micro=4"]
    assert all(
        row["alone"] and row["left_out"] and row["technique"] in row["sentence"]
        for row in whole["interactions"]
    )
    assert whole["batch_curve"] is not None
    assert [point["micro"] for point in whole["batch_curve"]] == [1, 2, 4]
    rung = whole["rungs"][2]["tokens_per_s"]
    assert rung is not None
    assert whole["batch_curve"][2]["tokens_per_s"]["median"] == rung["median"]
    # Asked for again, nothing is measured and nothing is forgotten.
    before = {file.name for file in out.glob("trials/*.json")}
    assert climb(plan, out)["interactions"] == whole["interactions"]
    assert {file.name for file in out.glob("trials/*.json")} == before


# Five per cent are always seen on a quiet machine. Beside other tests on two cores the interval is wide, and says so.
@pytest.mark.slow
def test_a_planted_slowdown_of_five_per_cent_is_found_and_an_identical_recipe_is_not_called_a_gain(
    ladder_file: LadderFile, tmp_path: Path
) -> None:
    base = 'techniques = [{name = "steady", step_us = 60000}]'
    slower = '{name = "steady", step_us = 63000}'
    path = ladder_file(['{"run.keep" = 3}', slower], base, processes=2, windows=6)
    record = climb(load_ladder(str(path)), tmp_path / "out", extra_techniques=[STEADY])
    _, same, slow = record["rungs"]
    assert same["verdict"] in ("no gain", "cannot tell"), "the second where the machine was busy"
    assert slow["gain"] is not None
    low, high = slow["gain"]["ci95"]
    assert low - 0.02 < 1 / 1.05 < high + 0.02
    assert slow["verdict"] == ("slower" if high < 1 else "cannot tell"), slow["gain"]
    assert record["drift"] is not None
    if high - low < 0.04:
        assert slow["verdict"] == "slower"
        assert slow["gain"]["real"]
        assert not record["drift"]["flagged"]
        assert not record["drift"]["restless"]


@pytest.mark.parametrize(
    ("interval", "flagged", "verdict"),
    [
        ([0.98, 1.03], False, "within its interval"),
        ([0.2, 1.3], False, "MACHINE TOO BUSY"),
        ([0.8, 0.9], True, "DRIFT"),
    ],
)
def test_the_table_shows_the_repeated_measurement_of_the_first_rung(
    interval: list[float], flagged: bool, verdict: str
) -> None:
    low, high = interval
    restless = high > RESTLESS * low
    drift = {"ratio": 0.85, "ci95": interval, "flagged": flagged, "restless": restless}
    told = caption_of({"drift": drift, "sequence_limits": None})  # type: ignore[typeddict-item]
    assert told is not None
    assert f"-15.0 % ({100 * (low - 1):+.1f} % to {100 * (high - 1):+.1f} %), {verdict}" in told


def test_the_table_names_gains_from_paired_batches_and_blames_no_machine_for_uneven_ones() -> None:
    drift = {
        "ratio": 1.0,
        "ci95": [0.7, 1.3],
        "flagged": False,
        "restless": True,
        "paired": None,
        "uneven": True,
    }
    gains = [None, {"ratio": 1.1, "paired": 12}, {"ratio": 1.1, "paired": None}]
    rungs = [
        {"title": title, "gain": gain} for title, gain in zip(("Base", "Pad", "Pack"), gains, strict=True)
    ]
    record = {"drift": drift, "sequence_limits": None, "rungs": rungs}
    told = caption_of(record)  # type: ignore[arg-type]
    assert told is not None
    assert "TOO UNEVEN" in told
    assert "BUSY" not in told
    assert told.endswith("computed from paired batches: Pad")
    quiet = {"drift": drift | {"ci95": [0.99, 1.01], "restless": False, "paired": 14, "uneven": False}}
    told = caption_of({**record, "rungs": rungs[:2], **quiet})  # type: ignore[typeddict-item]
    assert told is not None
    assert "measured again on 14 paired batches: +0.0 % (-1.0 % to +1.0 %), within its interval" in told
    assert told.endswith("paired batches: all gains")


@pytest.mark.slow
def test_a_killed_ladder_resumes_and_repeats_no_finished_trial(
    ladder_file: LadderFile, tmp_path: Path
) -> None:
    path, out = ladder_file(['"fused_adamw"', '"gc_control"']), tmp_path / "out"
    process = _start(path, out)
    _wait_for(lambda: len(list(out.glob("trials/*.json"))) >= 2, process)
    process.send_signal(signal.SIGKILL)  # nothing can be tidied up
    process.wait()
    _wait_for(lambda: not _commands(str(out)), None)  # the trial dies with its ladder
    before = {file.name: file.read_bytes() for file in out.glob("trials/*.json")}
    told: list[LadderProgress] = []
    record = climb(load_ladder(str(path)), out, watch=told.append)
    after = {file.name: file.read_bytes() for file in out.glob("trials/*.json")}
    assert len(before) in (2, 3)
    assert len(after) == 7  # three rungs, each with its life, and the first again
    assert {name: after[name] for name in before} == before
    assert record["finished"] is not None
    again = climb(load_ladder(str(path)), out)
    assert {file.name: file.read_bytes() for file in out.glob("trials/*.json")} == after
    assert [rung["tokens_per_s"] for rung in again["rungs"]] == [r["tokens_per_s"] for r in record["rungs"]]


# That a trial dies with its ladder is seen in the test above, by SIGKILL.
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_ladder_leaves_no_process(
    ladder_file: LadderFile, tmp_path: Path, sleep: str, number: signal.Signals
) -> None:
    path, out = ladder_file([_plant("hang")]), tmp_path / "out"
    process = _start(path, out, "--technique", str(PLANT))
    _wait_for(lambda: bool(_commands(sleep)), process)
    process.send_signal(number)
    assert process.wait(timeout=20) == 130
    assert _commands(sleep) == []
    assert _commands(str(out)) == []
    assert _commands(f"rush.lab.trial.starter {process.pid}") == []
    assert read_ladder(out)["finished"] is None
    assert "This ladder is not finished" in (out / "report.html").read_text()


@pytest.mark.slow
def test_killing_what_starts_the_trials_costs_one_trial_and_no_more(
    ladder_file: LadderFile, tmp_path: Path, sleep: str
) -> None:
    path, out = ladder_file([_plant("hang"), '"fused_adamw"']), tmp_path / "out"
    process = _start(path, out, "--technique", str(PLANT))
    _wait_for(lambda: bool(_commands(sleep)), process)
    for pid in _commands(f"rush.lab.trial.starter {process.pid}"):
        os.kill(pid, signal.SIGKILL)
    assert process.wait(timeout=120) == 0
    _, hung, fused = read_ladder(out)["rungs"]
    assert (hung["status"], fused["status"]) == ("out_of_memory", "ok")
    assert "SIGKILL" in str(hung["reason"])
    assert _commands(sleep) == []
    assert _commands(f"rush.lab.trial.starter {process.pid}") == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_twenty_comparisons_of_a_recipe_with_itself_give_at_most_two_false_gains(
    ladder_file: LadderFile, tmp_path: Path
) -> None:
    twins = [f'{{"run.keep" = {number}}}' for number in range(3, 23)]
    path = ladder_file(twins, processes=4, windows=10, window_ms=30.0)
    record = climb(load_ladder(str(path)), tmp_path / "out")
    gains = [rung["gain"] for rung in record["rungs"][1:]]
    assert len(gains) == 20
    assert sum(gain is not None and gain["real"] for gain in gains) <= 2


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_five_per_cent_of_real_work_more_is_found(ladder_file: LadderFile, tmp_path: Path) -> None:
    """Where intervals are narrower than that. On a machine that others use they may not be, which is no answer either way."""
    path = ladder_file([_plant("slow")], processes=8, windows=12, window_ms=40.0)
    for attempt in range(3):
        record = climb(load_ladder(str(path)), tmp_path / f"out-{attempt}", extra_techniques=[PLANT])
        rung = record["rungs"][1]
        assert rung["gain"] is not None
        low, high = rung["gain"]["ci95"]
        if rung["verdict"] == "slower" or high - low < 0.05:
            break
    else:
        pytest.skip(f"the machine was too busy to tell five per cent: at last {low:.3f} to {high:.3f}")
    assert rung["verdict"] == "slower"


def _start(path: Path, out: Path, *more: str) -> subprocess.Popen[bytes]:
    # Tests that were started in the background have Ctrl-C ignored, and hand that down; a person's ladder has not.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import sys, typer; from rush.cli.ladder import ladder\n"
        "app = typer.Typer(); app.command()(ladder)\n"
        "sys.exit(app(sys.argv[1:], standalone_mode=False))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, str(path), "--out", str(out), *more],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
    )


def _wait_for(met: Callable[[], bool], process: subprocess.Popen[bytes] | None) -> None:
    until = time.monotonic() + 90
    while not met():
        assert time.monotonic() < until
        assert process is None or process.poll() is None
        time.sleep(0.05)


def _commands(part: str) -> list[int]:
    """Living processes with this in their command line, but for this one."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            if part in words:
                found.append(int(folder.name))
    return found
