from __future__ import annotations

import signal
from typing import Any

import pytest

from rush.lab.ladder.findings import RungState, disturbed_of, verdict_of
from rush.lab.ladder.interactions import interactions
from rush.lab.ladder.ladder_file import Addition
from rush.lab.parity.judge import loosest
from rush.lab.statistics import Ratio
from rush.lab.trial.timing import rates
from rush.lab.trial.trial import Outcome, judged_trial


def _state(
    memory: int = 100, parity: str = "equal", over: RungState | None = None, took_effect: bool = True
) -> RungState:
    timing = {"step_tokens": 10, "samples_s": [1.0], "peak_memory_bytes": memory}
    evidence = [{"technique": "thing", "took_effect": took_effect, "what": "made up"}]
    outcome = Outcome("ok", None, {"timing": timing, "evidence": evidence})
    addition = Addition("thing", "thing", "thing", {})
    return RungState(addition, "thing", "thing", None, [outcome], over=over, parity={"verdict": parity})


FASTER, SLOWER, SAME = Ratio(1.5, 1.4, 1.6), Ratio(0.8, 0.7, 0.9), Ratio(1.0, 0.98, 1.02)
WIDE = Ratio(1.22, 0.998, 1.35)


@pytest.mark.parametrize(
    ("parity", "gain", "memory", "expected"),
    [
        ("equal", FASTER, 100, "equal and faster"),
        ("equal", SAME, 100, "no gain"),
        ("equal", SLOWER, 100, "slower"),
        ("equal", WIDE, 100, "cannot tell"),
        ("equal", WIDE, 60, "equal and smaller"),
        ("different", WIDE, 100, "different"),
        ("not judged", WIDE, 100, "cannot tell"),
        ("equal", None, 100, "cannot tell"),
        ("equal", SLOWER, 60, "equal and smaller"),
        ("equal", SAME, 97, "no gain"),
        ("different", FASTER, 100, "faster but different"),
        ("different", SLOWER, 60, "different"),
        ("not judged", FASTER, 100, "faster but different"),
        ("not judged", SAME, 60, "smaller but different"),
        ("not judged", SAME, 100, "no gain"),
    ],
)
def test_the_verdict_follows_from_gain_parity_and_memory(
    parity: str, gain: Ratio | None, memory: int, expected: str
) -> None:
    base = _state()
    assert verdict_of(_state(memory, parity, over=base), gain, smaller=0.05) == expected


def _measured(rates: list[list[float]], num_again: int = 0) -> RungState:
    outcomes = [
        Outcome("ok", None, {"timing": {"step_tokens": 1, "samples_s": [1 / rate for rate in each]}})
        for each in rates
    ]
    return RungState(None, "base", "base", None, outcomes, num_again=num_again)


def test_the_record_names_the_disturbed_process_and_what_it_came_to() -> None:
    found = disturbed_of(_measured([[100.0, 101.0], [60.0, 60.0], [99.0, 100.0], [101.0, 101.0]], 1))
    assert found is not None
    assert (found["process"], found["again"]) == (1, 1)
    assert found["ratio"] == pytest.approx(60 / 100.5)
    assert disturbed_of(_measured([[100.0], [97.0], [103.0]])) is None


def test_a_technique_without_evidence_has_no_effect_however_fast_it_is() -> None:
    state = _state(over=_state(), took_effect=False)
    assert verdict_of(state, FASTER, 0.05) == "no effect"
    assert "made up" in str(state.reason)


def test_a_rung_whose_life_is_broken_is_unusable_however_fast_it_is() -> None:
    state = _state(over=_state())
    state.life = {"verdict": "broken", "problem": "it cannot validate"}  # type: ignore[typeddict-item]
    assert verdict_of(state, FASTER, 0.05) == "unusable"
    assert state.reason == "it cannot validate"


@pytest.mark.parametrize(
    ("found", "code", "status", "words"),
    [
        ({}, -signal.SIGSEGV, "crashed", "SIGSEGV"),
        ({}, -signal.SIGKILL, "out_of_memory", "SIGKILL"),
        ({}, None, "timed_out", "9 s"),
        ({}, 1, "crashed", "ValueError: planted"),
        ({"timing": {}}, 1, "crashed", "exit code 1"),
        ({"timing": {"x": 1}}, 1, "ok", "after the timing"),
        ({"complete": True, "status": "diverged", "reason": "r"}, 0, "diverged", "r"),
    ],
)
def test_a_trials_status_follows_from_how_it_ended(
    found: dict[str, Any], code: int | None, status: str, words: str
) -> None:
    got, reason = judged_trial(found, code, 9.0, "Traceback\nValueError: planted\n")
    assert got == status
    assert words in str(reason)


def test_a_recipe_promises_what_its_loosest_technique_does() -> None:
    assert loosest([]).name == "EXACT"
    assert loosest(["CLOSE", "EXACT", "STATISTICAL"]).name == "STATISTICAL"


def test_interactions_compare_the_three_views() -> None:
    def record(name: str, ratio: float, drift: float | None = None) -> Any:
        gain = {"ratio": ratio, "ci95": [ratio - 0.01, ratio + 0.01]}
        moved = None if drift is None else {"ratio": drift, "flagged": True}
        return {"rungs": [{"name": "base", "gain": None}, {"name": name, "gain": gain}], "drift": moved}

    (row,) = interactions(record("x", 1.3), record("x", 1.5), record("without x", 0.9))
    assert (row["alone"], row["in_ladder"]) == (1.5, 1.3)
    assert row["left_out"] == pytest.approx(1 / 0.9)
    assert "already save part" in row["sentence"]
    (row,) = interactions(record("x", 1.0), record("x", 1.0), record("without x", 0.97))
    assert "make room" in row["sentence"]
    (row,) = interactions(record("x", 1.0), record("x", 1.0), record("without x", 0.97, drift=0.96))
    assert "within the noise" in row["sentence"], "the machine moved further than the gain"


def test_rates_count_each_samples_own_tokens_of_the_kind_that_counts() -> None:
    """Documents differ in length: a step of many labels is not as fast as one of few in the same time."""
    timing: dict[str, Any] = {
        "samples_s": [2.0, 2.0],
        "counted": "trained",
        "sample_tokens": {"processed": [100, 100], "real": [60, 80], "trained": [10, 40]},
    }
    assert rates(timing) == [5.0, 20.0]
    assert rates(timing, "processed") == [50.0, 50.0]
    older = {"samples_s": [2.0, 4.0], "step_tokens": 100, "step_labels": 100}
    assert rates(older) == [50.0, 25.0]
