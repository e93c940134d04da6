"""Samples of one process are one measurement: an interval is as wide as the distance between processes, however many
samples each has and however alike they are."""

from __future__ import annotations

import numpy as np
import pytest

from rush.lab.statistics import Floor, median_interval, ratio_of_medians

NO_FLOOR = Floor(0.0, 0, 0.0)


def processes(*medians: float, samples: int = 40) -> list[list[float]]:
    """Processes that lie apart, of samples that are within a thousandth of each other."""
    rng = np.random.default_rng(0)
    return [(median * rng.normal(1, 3e-4, samples)).tolist() for median in medians]


@pytest.mark.parametrize("samples", [5, 40, 400])
def test_the_interval_of_a_median_reaches_from_process_to_process(samples: int) -> None:
    found = median_interval(processes(92.0, 100.0, 108.0, samples=samples))
    assert found.median == pytest.approx(100.0, rel=1e-3)
    assert found.low < 93
    assert found.high > 107


def test_two_recipes_whose_processes_overlap_are_not_told_apart_by_many_samples() -> None:
    before, after = processes(92.0, 100.0, 108.0, samples=400), processes(95.0, 103.0, 111.0, samples=400)
    found = ratio_of_medians(before, after, NO_FLOOR)
    assert found.ratio == pytest.approx(1.03, rel=1e-3)
    assert found.low < 1 < found.high, "three per cent, between processes that are eight apart"
    assert [found.real, found.faster, found.slower] == [False, False, False]
    near = ratio_of_medians(processes(99.9, 100.0, 100.1), processes(102.9, 103.0, 103.1), NO_FLOOR)
    assert near.faster, "the same three per cent, between processes that agree"
