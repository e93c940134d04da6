"""What a race finds, from curves of which the answer is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rush.errors import DataError
from rush.lab.race.findings import mean_interval
from rush.records.race import check_race
from rush.records.race_curves import RacePoint, leg_time, reached, training_seconds
from rush.report.race_words import finding_words, rate_of, verdict_of, winner_of
from tests.report import made_up_race
from tests.report.made_up_race import power_law, run


def found(*runs: dict[str, Any], **rest: Any) -> Any:
    record: Any = made_up_race.race(runs, **rest)
    check_race(record, "made up")
    return record


def test_net_is_gross_less_the_tokens_that_are_needed_more() -> None:
    record: Any = made_up_race.race()
    (finding,) = record["findings"]
    assert finding["gross"]["ratio"] == pytest.approx(1.5, rel=1e-3)
    assert finding["more_tokens"]["ratio"] == pytest.approx(1.2, abs=0.02)
    assert finding["net"]["ratio"] == pytest.approx(1.5 / finding["more_tokens"]["ratio"], rel=1e-3)
    low, high = finding["net"]["ci95"]
    assert low < finding["net"]["ratio"] < high
    assert verdict_of(finding) == "sooner"
    assert "% more tokens" in finding_words(record, finding)
    assert winner_of(record) == "B"


def test_a_recipe_with_faster_steps_that_learns_worse_loses_net_though_it_wins_gross() -> None:
    seeds = (1, 2, 3)
    record = found(
        *(run("A", seed, power_law(1 + 0.01 * seed), 0.30) for seed in seeds),
        *(run("B", seed, power_law(1.8 + 0.01 * seed), 0.25) for seed in seeds),
    )
    (finding,) = record["findings"]
    assert finding["gross"]["ci95"][0] > 1
    assert finding["net"]["ci95"][1] < 1
    assert verdict_of(finding) == "later"
    assert winner_of(record) == "A"
    gaps = [one["gap"] for one in finding["gaps"]]
    assert min(gaps) > 0


def test_one_seed_has_no_interval_and_no_winner() -> None:
    record = found(run("A", 1, power_law(), 0.3), run("B", 1, power_law(), 0.1))
    (finding,) = record["findings"]
    assert finding["net"]["ratio"] == pytest.approx(3.0, rel=1e-6)
    assert finding["net"]["ci95"] is None
    assert verdict_of(finding) == "one seed"
    assert winner_of(record) is None


def test_depths_are_losses_that_all_had_reached() -> None:
    record: Any = made_up_race.race()
    slowest = [power_law(1.2 + 0.015 * number) for number in range(3)]
    assert [depth["loss"] for depth in record["depths"]] == pytest.approx(
        [np.mean([one(fraction * 40_000) for one in slowest]) for fraction in (0.25, 0.5, 0.75, 1.0)]
    )
    for depth in record["depths"]:
        assert depth["tokens"]["A"] < depth["tokens"]["B"]
        assert depth["seconds"]["A"] > depth["seconds"]["B"]


def test_a_loss_is_reached_between_two_validations_and_never_by_a_rise() -> None:
    points = [RacePoint(10, 1, 5.0), RacePoint(20, 2, 4.0), RacePoint(30, 3, 4.5), RacePoint(40, 4, 3.0)]
    assert reached(points, 4.25) == RacePoint(17.5, 1.75, 4.25)
    assert reached(points, 3.75) == RacePoint(35.0, 3.5, 3.75)
    assert reached(points, 6.0) == points[0]
    assert reached(points, 2.0) is None
    assert reached(points, 6.0, RacePoint(0, 0, 7.0)) == RacePoint(5.0, 0.5, 6.0)
    assert reached(points, 6.0, RacePoint(0, 0, 6.0)) == points[0]


def test_the_slow_first_steps_of_a_leg_count_as_the_others_and_stand_apart() -> None:
    one: Any = run("A", 1, power_law(), 0.3, legs=2, first_s=5.0)
    one["step_s"][1] = 2.0
    assert training_seconds(one)[-1] == pytest.approx(40 * 0.3)
    time = leg_time(one, one["legs"][0])
    assert (time.steps, time.warmup_steps) == (20, 2)
    assert time.warmup_s == pytest.approx(5.0 + 1.7)
    assert time.around_s == pytest.approx(30 - 20 * 0.3 - 6.7)
    one["step_s"][10] = 4.0  # in the middle of a leg a slow step is how the recipe runs
    assert training_seconds(one)[-1] == pytest.approx(39 * 0.3 + 4.0)


def test_a_diverged_contender_is_out_and_the_others_are_compared() -> None:
    record = found(
        run("A", 1, power_law(), 0.3, status="diverged", steps=10),
        run("B", 1, power_law(), 0.2),
        run("C", 1, power_law(), 0.1),
    )
    (finding,) = record["findings"]
    assert (finding["contender"], finding["against"]) == ("C", "B")
    assert made_up_race.broken_race()["findings"] == []


def test_only_seeds_that_both_have_raced_with_are_compared() -> None:
    record = found(
        run("A", 1, power_law(), 0.3), run("A", 2, power_law(), 0.3),
        run("B", 1, power_law(), 0.2), run("B", 2, power_law(), 0.2, status="waiting", steps=0),
    )  # fmt: skip
    assert len(record["findings"][0]["net"]["samples"]) == 1


def test_a_race_to_a_loss_compares_at_that_loss() -> None:
    record = found(run("A", 1, power_law(), 0.3), run("B", 1, power_law(1.5), 0.3), until_loss=2.9)
    (finding,) = record["findings"]
    assert record["depths"][-1]["name"] == "as asked for"
    assert finding["more_tokens"]["ratio"] == pytest.approx(1.5, abs=0.02)
    never = found(run("A", 1, power_law(), 0.3), run("B", 1, power_law(1.5), 0.3), until_loss=2.45)
    assert never["depths"][-1]["tokens"]["B"] is None
    assert never["findings"][0]["net"] is not None, "the last depth that both reached"


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_interval_of_a_few_seeds_holds_the_truth_as_often_as_it_says(count: int) -> None:
    rng = np.random.default_rng(7)
    inside = 0
    for _ in range(150):
        ends = mean_interval(list(rng.normal(size=count)))
        assert ends is not None
        inside += ends[0] <= 0 <= ends[1]
    assert inside >= 0.88 * 150


def test_a_growing_batch_is_timed_by_its_tokens() -> None:
    """Half of the steps have half of the tokens and half of the time: as fast as steps of one size, whatever the leg's median is."""
    steady = [run("A", seed, power_law(), 0.4) for seed in (1, 2)]
    grown: list[Any] = [run("B", seed, power_law(), 0.4) for seed in (1, 2)]
    for one in grown:
        sizes = [500] * 40 + [1000] * 20
        ends = [tokens // 1000 for tokens in np.cumsum(sizes)]
        one["tokens"], one["step_s"] = sizes, [size / 2500 for size in sizes]
        one["losses"] = [power_law()(1000 * end) for end in ends]
        for leg, (first, last) in zip(one["legs"], ((1, 20), (21, 40), (41, 50), (51, 60)), strict=True):
            leg |= {"first": first, "last": last}
            one["step_s"][first - 1] += 1.0
        for place in one["validations"]:
            place["step"] = (
                place["tokens"] // 500 if place["tokens"] <= 20_000 else 20 + place["tokens"] // 1000
            )
    record = found(*steady, *grown)
    (finding,) = record["findings"]
    assert finding["gross"]["ratio"] == pytest.approx(1.0)
    assert len(finding["gross"]["samples"]) == 8, "legs are compared where they end after the same tokens"
    assert finding["net"]["ratio"] == pytest.approx(1.0)
    assert rate_of(record, "B") == pytest.approx(2500)
    assert leg_time(grown[0], grown[0]["legs"][0]).warmup_s == pytest.approx(1.0)
    grown[0]["tokens"].pop()
    with pytest.raises(DataError, match="the tokens of 59 steps"):
        check_race(record, "made up")
