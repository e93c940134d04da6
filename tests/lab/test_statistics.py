from __future__ import annotations

import math

import numpy as np
import pytest

from rush.lab.statistics import (
    Floor,
    Ratio,
    center,
    disturbed,
    floor_near,
    median_interval,
    noise_floor,
    ratio_of_medians,
    student_quantile,
)


def _processes(
    rng: np.random.Generator, count: int, samples: int, between: float, within: float, level: float = 1000.0
) -> list[list[float]]:
    """Rates whose processes lie apart: a normal logarithm for each process, and noise inside it."""
    shifts = rng.normal(0, between, count)
    return [list(level * np.exp(shift + rng.normal(0, within, samples))) for shift in shifts]


@pytest.mark.parametrize(
    ("freedom", "known"), [(3, 3.182), (4, 2.776), (10, 2.228), (30, 2.042), (1000, 1.962)]
)
def test_students_quantile_is_the_tabulated_one(freedom: int, known: float) -> None:
    assert student_quantile(freedom) == pytest.approx(known, rel=0.012)


def test_one_disturbed_process_of_three_does_not_move_the_centre() -> None:
    assert center([[100, 101, 99], [100, 100, 102], [10, 11, 12]]) == 100
    assert center([[100], [100], [100], [85], [80]]) == 100, "nor do two of five"


def test_the_interval_of_a_median_has_its_nominal_coverage() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for trial in range(200):
        interval = median_interval([list(rng.lognormal(0, 0.05, 40))], seed=trial)
        hits += interval.low <= 1.0 <= interval.high
    assert 0.90 <= hits / 200 <= 0.99


@pytest.mark.parametrize("processes", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_recipes_that_are_the_same_are_rarely_called_different(processes: int) -> None:
    rng = np.random.default_rng(processes)
    false = 0
    for trial in range(100):
        rungs = [_processes(rng, processes, 10, between=0.02, within=0.01) for _ in range(9)]
        floor = noise_floor(rungs)
        a, b = rungs[0], rungs[1]
        false += ratio_of_medians(a, b, floor, seed=trial).real
    assert false <= 8


def test_an_interval_from_samples_alone_would_be_fooled_by_processes() -> None:
    """The reason for all this: pooled samples of one process each are certain of differences that are not there."""
    rng = np.random.default_rng(7)
    fooled = sum(
        ratio_of_medians(
            _processes(rng, 1, 30, between=0.02, within=0.005),
            _processes(rng, 1, 30, between=0.02, within=0.005),
            Floor(0.0, 0),
            seed=trial,
        ).real
        for trial in range(100)
    )
    assert fooled > 60


@pytest.mark.parametrize(("processes", "at_least"), [(3, 65), pytest.param(5, 90, marks=pytest.mark.slow)])
def test_five_per_cent_is_found_among_nine_rungs(processes: int, at_least: int) -> None:
    rng = np.random.default_rng(3)
    found = 0
    for trial in range(100):
        rungs = [_processes(rng, processes, 10, between=0.015, within=0.01) for _ in range(8)]
        slow = _processes(rng, processes, 10, between=0.015, within=0.01, level=1000 / 1.05)
        floor = noise_floor([*rungs, slow])
        found += ratio_of_medians(rungs[-1], slow, floor, seed=trial).slower
    assert found >= at_least


def test_the_ratio_is_the_quotient_and_its_interval_holds_it() -> None:
    ratio = ratio_of_medians([[100.0] * 5], [[150.0] * 5], Floor(0.0, 0, least=0.01))
    assert ratio.ratio == pytest.approx(1.5)
    assert ratio.low == pytest.approx(1.5 * math.exp(-0.01))
    assert ratio.high == pytest.approx(1.5 * math.exp(0.01))
    assert ratio.faster


def test_with_the_base_alone_measured_twice_only_large_differences_are_believed() -> None:
    rungs = [[[100.0] * 9, [100.0] * 9], [[88.0] * 9], [[160.0] * 9]]
    floor = noise_floor(rungs)
    assert not ratio_of_medians(
        rungs[0], rungs[1], floor
    ).real  # the base's two processes say nothing of the others
    assert ratio_of_medians(rungs[0], rungs[2], floor).faster
    assert noise_floor([[[100.0], [130.0]], [[50.0]]]).half_width(1, 1) >= math.log(1.3)


def test_with_two_recipes_measured_twice_the_floor_is_their_distance() -> None:
    floor = noise_floor([[[100.0], [103.0]], [[50.0], [51.5]]])
    assert math.log(1.03) <= floor.half_width(2, 2) <= 2.2 * math.log(1.03)


def test_one_process_in_a_busy_minute_does_not_blind_the_ladder() -> None:
    rng = np.random.default_rng(5)
    rungs = [_processes(rng, 2, 10, between=0.01, within=0.01) for _ in range(8)]
    rungs[0][0] = [rate / 8 for rate in rungs[0][0]]
    slow = _processes(rng, 2, 10, between=0.01, within=0.01, level=850.0)
    floor = noise_floor([*rungs, slow])
    assert ratio_of_medians(rungs[-1], slow, floor).slower
    assert not ratio_of_medians(rungs[0], rungs[1], floor).real


def test_restless_rungs_are_judged_by_their_neighbours_and_quiet_ones_by_theirs() -> None:
    """As on a GPU: while it has much to do, processes agree; once it waits for its host, they lie far apart."""
    rng = np.random.default_rng(11)
    by_all, by_neighbours, found = 0, 0, 0
    for trial in range(60):
        rungs = [_processes(rng, 2, 10, 0.04 if rung >= 14 else 0.004, 0.004) for rung in range(24)]
        rungs[6] = [
            [rate * 1.03 for rate in samples] for samples in rungs[6]
        ]  # a small gain where it is quiet
        pair = rungs[18], rungs[19]  # the same, where it is not
        by_all += ratio_of_medians(*pair, noise_floor(rungs), seed=trial).real
        by_neighbours += ratio_of_medians(*pair, floor_near(rungs, 19), seed=trial).real
        found += ratio_of_medians(rungs[5], rungs[6], floor_near(rungs, 6), seed=trial).faster
    assert by_all > 2 * 6, "the reason for asking the neighbours"
    assert by_neighbours <= 6, by_neighbours
    assert found >= 54


def test_the_same_seed_gives_the_same_interval() -> None:
    rng = np.random.default_rng(0)
    samples = _processes(rng, 3, 10, 0.02, 0.01)
    assert median_interval(samples) == median_interval(samples)


@pytest.mark.parametrize(
    ("rates", "found"),
    [
        ([100, 101, 60], 2),
        ([60, 100, 101, 99, 100, 102], 0),
        ([100, 101, 92], None),  # not slow enough
        ([100, 60], None),  # nobody knows which
        ([100, 61, 60], None),  # twice is how the recipe runs
        ([100, 101, 60, 61], None),
        ([100, 85, 60], None),  # all lie apart
        ([100, 101, 170], None),  # nothing makes a process faster
    ],
)
def test_a_disturbed_process_is_one_that_is_slow_alone(rates: list[float], found: int | None) -> None:
    assert disturbed(np.log(rates)) == found


def _one_disturbed(rng: np.random.Generator, *recipes: list[list[float]]) -> None:
    """One process of all of these runs at 0.4 to 0.8 of its rate, in place."""
    recipe = recipes[rng.integers(len(recipes))]
    place = rng.integers(len(recipe))
    recipe[place] = [rate * rng.uniform(0.4, 0.8) for rate in recipe[place]]


def test_one_disturbed_process_of_six_does_not_hide_a_loss_of_fifteen_per_cent() -> None:
    """Before, its interval was −49 to +41 %."""
    rng = np.random.default_rng(17)
    found = 0
    for trial in range(40):
        rungs = [_processes(rng, 3, 10, between=0.015, within=0.01) for _ in range(8)]
        slow = _processes(rng, 3, 10, between=0.015, within=0.01, level=850.0)
        _one_disturbed(rng, rungs[-1], slow)
        ratio = ratio_of_medians(rungs[-1], slow, floor_near([*rungs, slow], 8), seed=trial)
        found += ratio.slower
    assert found >= 38


@pytest.mark.parametrize(
    "noise",
    ["one disturbed", "every tenth disturbed", pytest.param("restless rungs", marks=pytest.mark.slow)],
)
def test_recipes_that_are_the_same_give_false_gains_in_at_most_five_per_cent(noise: str) -> None:
    rng = np.random.default_rng(23)
    trials, gains = 60, 0
    for trial in range(trials):
        between = 0.08 if noise == "restless rungs" else 0.02
        rungs = [_processes(rng, 3, 10, between, within=0.01) for _ in range(9)]
        if noise == "one disturbed":
            _one_disturbed(rng, rungs[-2], rungs[-1])
        if noise == "every tenth disturbed":
            for rung in rungs:
                for place in range(3):
                    if rng.random() < 0.1:
                        rung[place] = [rate * rng.uniform(0.4, 0.9) for rate in rung[place]]
        gains += ratio_of_medians(rungs[-2], rungs[-1], floor_near(rungs, 8), seed=trial).faster
    assert gains <= 0.05 * trials


def test_on_quiet_machines_the_rule_about_disturbed_processes_changes_nothing() -> None:
    """Processes 2 % apart: of a thousand recipes none is said to have a disturbed one, so gains are found as often as without."""
    rng = np.random.default_rng(29)
    for count in (3, 4, 6):
        assert all(disturbed(rng.normal(0, 0.02, count)) is None for _ in range(350))


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (1.01, 1.2, "faster"), (0.8, 0.99, "slower"), (0.98, 1.02, "no gain"), (0.998, 1.353, "cannot tell"),
        (0.9, 1.01, "cannot tell"), (0.6, 1.4, "cannot tell"), (0.97, 1.03, "cannot tell"), (1.0, 1.01, "no gain"),
    ],
)  # fmt: skip
def test_an_interval_around_one_is_no_gain_only_where_it_is_narrow(
    low: float, high: float, word: str
) -> None:
    assert Ratio((low * high) ** 0.5, low, high).judged == word
