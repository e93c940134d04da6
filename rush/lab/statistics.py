"""Medians with bootstrap intervals, and when a difference counts as a gain.

Samples of one process are correlated: they share memory layout, CPU affinity and time of day. A second
process of the same recipe differs from the first by more than the first one's own interval. So intervals come
from a hierarchical bootstrap, over processes first and over the samples in them second; and a difference of
two recipes only counts above the noise floor: the spread between processes of one recipe on this machine,
today, over neighboring rungs. (Similar rungs vary alike: a step that waits for its host varies ten times as
much as one that does not.)

One process may be disturbed: another program ran on the machine while it was timed. It would make the
interval of its rung uselessly wide, so it is detected (`disturbed`) and excluded from every interval; the
record keeps its samples and names it, and the ladder measures the rung once more.

With one process per rung the spread between processes is known only from the base, which is measured again at the
end, and other rungs may vary more: then only large differences count.

Where both sides were timed on the same unequal batches (`rush.lab.paired`), the ratio is computed batch by batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rush.records.gains import Judgement, judge

DRAWS = 4000
ALONE = 0.15
"""Differences below this do not count where at most one recipe was measured twice. Seen on a GPU that waits for its
host, in processes of rungs that cannot differ: 16 %; in the same ladder the base came out the same to 0.02 %."""
DISTURBED = 0.10
"""A process is disturbed only if it is slower than every other of its recipe by more than this. Quiet processes of one
recipe lie 0.1 to 2 % apart, so that a quiet one is not left out by chance, and gains stay as they are on quiet machines."""
ALONE_BY = 6.0
"""And only if it is further from the others than this many times the distance between the farthest of those: where all lie
apart, as in a step that waits for its host, that is how the recipe runs."""
NEAR = 8
"""From so many recipes, measured more than once and next to each other, a noise floor is taken."""
Array = npt.NDArray[np.float64]
Processes = Sequence[Sequence[float]]


@dataclass(frozen=True)
class Interval:
    """A median with its 95 % interval."""

    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Ratio:
    """The ratio of two speeds with its 95 % interval; `real` if the interval excludes 1."""

    ratio: float
    low: float
    high: float
    paired: int | None = None
    """The number of paired batches; None if it is the ratio of two medians."""

    @property
    def judged(self) -> Judgement:
        """The verdict of the interval: faster, slower, no gain, or cannot tell."""
        return judge(self.low, self.high)

    @property
    def real(self) -> bool:
        return self.low > 1 or self.high < 1

    @property
    def faster(self) -> bool:
        return self.low > 1

    @property
    def slower(self) -> bool:
        return self.high < 1


@dataclass(frozen=True)
class Floor:
    """How far processes of one recipe lie apart: standard deviation of the logarithm of their medians."""

    spread: float
    freedom: int
    """Independent differences the spread was estimated from; few of them make every interval wider."""
    least: float = 0.0
    """A difference in the logarithm below this never counts."""

    def half_width(self, num_first: int, num_second: int) -> float:
        """Half the 95 % interval that this spread alone gives the logarithm of a quotient."""
        if self.freedom == 0:
            return self.least
        error = self.spread * math.sqrt(_variance_of_median(num_first) + _variance_of_median(num_second))
        return max(self.least, student_quantile(self.freedom) * error)


def disturbed(logs: Sequence[float] | Array) -> int | None:
    """Which process was disturbed, from the logarithm of each one's rate; None where none was, or it cannot be said.

    At most one of three or more: with two it is unknown which one, and two slow processes show how the recipe
    runs. Only a slower one: another program makes nothing faster.
    """
    if len(logs) < 3:
        return None
    in_order = np.argsort(np.asarray(logs), kind="stable")
    slowest, *others = (float(logs[place]) for place in in_order)
    behind = others[0] - slowest
    alone = behind > -math.log1p(-DISTURBED) and behind > ALONE_BY * (others[-1] - others[0])
    return int(in_order[0]) if alone else None


def undisturbed(processes: Processes) -> Processes:
    """The processes without the disturbed one, where there is one."""
    found = disturbed(logs_of_medians(processes))
    return [samples for place, samples in enumerate(processes) if place != found]


def center(processes: Processes) -> float:
    """The median of the undisturbed processes' medians."""
    return float(np.median([np.median(samples) for samples in undisturbed(processes)]))


def median_interval(processes: Processes, seed: int = 0) -> Interval:
    """The median over processes with its 95 % interval, by resampling processes and samples in them."""
    processes = undisturbed(processes)
    middle = center(processes)
    # In logarithms, as rates and times vary by factors; so no interval reaches below zero.
    drawn = np.log(_resampled(processes, np.random.default_rng(seed)))
    spread = _widened(drawn, math.log(middle), len(processes))
    low, high = np.exp(np.quantile(spread, (0.025, 0.975)))
    n = sum(len(samples) for samples in processes)
    return Interval(middle, min(float(low), middle), max(float(high), middle), n)


def ratio_of_medians(first: Processes, second: Processes, floor: Floor, seed: int = 0) -> Ratio:
    """The ratio of `second` to `first` (both rates), with an interval no narrower than the floor."""
    rng = np.random.default_rng(seed)
    first, second = undisturbed(first), undisturbed(second)
    middle = math.log(center(second)) - math.log(center(first))
    parts = []
    for processes, sign in ((first, -1.0), (second, 1.0)):
        drawn = np.log(_resampled(processes, rng))
        own = math.log(center(processes))
        parts.append(sign * (_widened(drawn, own, len(processes)) - own))
    return _ratio(middle, parts[0] + parts[1], floor.half_width(len(first), len(second)))


def ratio_of_pairs(first: Array, second: Array, floor: Floor, seed: int = 0) -> Ratio:
    """The ratio of `second` to `first`: logarithms of rates, a row for every process, a column for every batch.

    The processes of either side and the batches, which are the same for all, are resampled separately; their deviations
    are added.
    """
    rng = np.random.default_rng(seed)
    first, second = _undisturbed_rows(first), _undisturbed_rows(second)
    middle = middle_of_pairs(first, second)
    apart = np.median(second[None, :] - first[:, None], axis=-1)
    num_first, num_second, num_batches = *apart.shape, first.shape[1]
    by_first = _middle(apart[rng.integers(num_first, size=(num_first, DRAWS))].swapaxes(1, 2))
    by_second = _middle(apart[:, rng.integers(num_second, size=(num_second, DRAWS))])
    picks = rng.integers(num_batches, size=(DRAWS, num_batches))
    by_batches = _middle(np.median(second[None, :, picks] - first[:, None, picks], axis=-1))
    drawn = np.zeros(DRAWS)
    for part, count in ((by_first, num_first), (by_second, num_second), (by_batches, num_batches)):
        drawn += _widened(part, middle, count) - middle
    return _ratio(middle, drawn, floor.half_width(num_first, num_second), num_batches)


def _ratio(middle: float, drawn: Array, least: float, paired: int | None = None) -> Ratio:
    """The ratio from its logarithm, with the 95 % interval of the draws around it, no narrower than `least`."""
    low, high = np.quantile(drawn, (0.025, 0.975))
    below, above = middle + min(float(low), -least), middle + max(float(high), least)
    return Ratio(math.exp(middle), math.exp(below), math.exp(above), paired)


def pooled(records: Sequence[Ratio], seed: int = 0) -> Ratio:
    """The median of the same ratio from several records, with an interval over all of them.

    By the bootstrap again: records with replacement, then one value inside each one's own interval. So records that
    contradict each other give a wide interval, however narrow their own.
    """
    if len(records) == 1:
        return records[0]
    rng = np.random.default_rng(seed)
    middles = np.log([record.ratio for record in records])
    below = middles - np.log([record.low for record in records])
    above = np.log([record.high for record in records]) - middles
    chosen = rng.integers(len(records), size=(DRAWS, len(records)))
    steps = rng.normal(size=chosen.shape) / 1.96
    drawn = np.median(middles[chosen] + steps * np.where(steps < 0, below[chosen], above[chosen]), axis=1)
    middle = float(np.median(middles))
    return _ratio(middle, _widened(drawn, middle, len(records)) - middle, 0.0)


def middle_of_pairs(first: Array, second: Array) -> float:
    """The logarithm of the quotient: the median over batches for every two processes, then that over processes."""
    first, second = _undisturbed_rows(first), _undisturbed_rows(second)
    return float(_middle(np.median(second[None, :] - first[:, None], axis=-1)))


def _undisturbed_rows(logs: Array) -> Array:
    """The rows without that of a disturbed process: each one's median, less what its batches make."""
    found = disturbed(np.median(logs - np.median(logs, axis=0), axis=1))
    return logs if found is None else np.delete(logs, found, axis=0)


def _middle(apart: Array) -> Array:
    """The median over the processes of the first side (first axis), then over those of the second (next axis)."""
    return np.asarray(np.median(np.median(apart, axis=0), axis=0), dtype=np.float64)


def noise_floor(recipes: Iterable[Processes], least: float = 0.0) -> Floor:
    """The spread between processes of the same recipe, over all recipes measured more than once."""
    return floor_of([logs_of_medians(processes) for processes in recipes if len(processes) > 1], least)


def logs_of_medians(processes: Processes) -> Array:
    """The logarithm of each process's median."""
    return np.asarray(np.log([float(np.median(samples)) for samples in processes]), dtype=np.float64)


def floor_of(recipes: Iterable[Array], least: float = 0.0) -> Floor:
    """The spread between processes, from the log medians of each recipe (at least two of each).

    It is the median of the recipes' own spreads, each without its disturbed process: what disturbed some must not widen the
    whole ladder.
    """
    spreads, freedom = [], 0
    for every in recipes:
        logs = np.delete(every, found) if (found := disturbed(every)) is not None else every
        own = len(logs) - 1
        # A spread from few processes is mostly too small; this is the median of its distribution.
        usual = math.sqrt((1 - 2 / (9 * own)) ** 3)
        spreads.append(float(np.std(logs, ddof=1)) / usual)
        freedom += own
    spread = float(np.median(spreads)) if spreads else 0.0
    if freedom < 3:
        # From one or two differences no spread can be estimated; the distance itself must do.
        return Floor(0.0, 0, max(least, 2 * spread, ALONE if freedom < 2 else 0.0))
    return Floor(spread, freedom, least)


def floor_near(recipes: Sequence[Processes], place: int, least: float = 0.0) -> Floor:
    """The noise floor at a place in a list of recipes where neighbors are alike: from the nearest measured twice."""
    twice = [other for other, processes in enumerate(recipes) if len(processes) > 1]
    nearest = sorted(twice, key=lambda other: abs(other - place))[:NEAR]
    return noise_floor([recipes[other] for other in nearest], least)


def student_quantile(freedom: int) -> float:
    """The 97.5 % point of Student's distribution (expansion around the normal one; within 1 % from 3 up)."""
    assert freedom >= 3, freedom
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + math.fsum(term / float(freedom) ** power for power, term in enumerate(terms, start=1))


def _variance_of_median(count: int) -> float:
    """Variance of the median of `count` draws from a normal distribution, in units of its own variance."""
    small = {1: 1.0, 2: 0.5, 3: 0.449, 4: 0.298, 5: 0.287}
    return small.get(count, math.pi / 2 / count)


def _resampled(processes: Processes, rng: np.random.Generator) -> Array:
    """Medians of `DRAWS` bootstrap draws: processes with replacement, then samples in each."""
    count = len(processes)
    chosen = rng.integers(count, size=(DRAWS, count))
    medians = np.empty((DRAWS, count))
    for index, samples in enumerate(processes):
        here = chosen == index
        values = np.asarray(samples, dtype=np.float64)
        picks = rng.integers(len(values), size=(int(here.sum()), len(values)))
        medians[here] = np.median(values[picks], axis=1)
    return np.asarray(np.median(medians, axis=1), dtype=np.float64)


def _widened(drawn: Array, middle: float, count: int) -> Array:
    """A bootstrap over few things understates their spread by √((n−1)/n); this corrects it."""
    return middle + (drawn - middle) * (math.sqrt(count / (count - 1)) if count > 1 else 1.0)
