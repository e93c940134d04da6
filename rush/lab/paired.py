"""Paired comparison: two recipes compared batch by batch, where both were timed on the same batches.

In fine-tuning batches differ in their tokens: the samples of one process vary by a third on an idle machine. But every
process of a ladder gets the same batches in the same order, so a sample of one recipe has a partner in the other: the
sample on the same batches. The ratio of the two is free of the data's variation.

Samples are partners if they began with the same step and hold the same number of counted tokens. All that both
processes timed must agree; otherwise order or packing differ and nothing is paired. Older timings without steps are
aligned by their token counts alone, if there is only one way to do it. Where all counts are the same, as in pretraining
with full rows, pairing gains nothing, and nothing is paired.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import combinations

import numpy as np

from rush.lab import statistics as stats
from rush.lab.statistics import Array, Floor, Ratio

LEAST_PAIRS = 6
"""Minimum number of batches that all compared processes share. Fewer than six samples give no 95 % interval of a median: with
five, the median lies outside their range in one case of sixteen. And six varying counts in a row do not agree by chance."""
LEAST_SHARE = 0.5
"""Least fraction of the samples of each process with a partner; with fewer, pairing loses more than it gains. A technique may gain on some
batches and not on others (padding to the longest row does), and a few batches do not represent the rest."""


@dataclass(frozen=True)
class Timed:
    """The samples of one process and the batches they were taken on."""

    rates: Sequence[float]
    tokens: Sequence[float] = ()
    """Counted tokens per step of each sample; empty where not known."""
    steps: Sequence[int] | None = None
    """The step each sample began with; None where that is not known."""
    span: int = 1
    """Steps in a sample."""


Recipes = Sequence[Sequence[Timed]]


@dataclass(frozen=True)
class Floors:
    """The noise floor of a comparison of medians, and that of one batch by batch."""

    medians: Floor
    pairs: Floor


def compare(first: Sequence[Timed], second: Sequence[Timed], floors: Floors, seed: int = 0) -> Ratio:
    """The ratio of `second` to `first`: batch by batch where they share enough batches, else by their medians."""
    found = _paired_logs(first, second)
    if found is None:
        return stats.ratio_of_medians(_rates(first), _rates(second), floors.medians, seed)
    return stats.ratio_of_pairs(*found, floors.pairs, seed)


def quotient(first: Sequence[Timed], second: Sequence[Timed]) -> float:
    """The same without an interval."""
    found = _paired_logs(first, second)
    if found is None:
        return stats.center(_rates(second)) / stats.center(_rates(first))
    return math.exp(stats.middle_of_pairs(*found))


def floors_of(recipes: Recipes, least: float = 0.0) -> Floors:
    """The noise floors from all recipes measured more than once.

    That of pairs leaves out a recipe whose processes were timed on different batches: their distance is the data's.
    """
    within = (_own_spread(processes) for processes in recipes)
    pairs = stats.floor_of([logs for logs in within if logs is not None], least)
    return Floors(stats.noise_floor(map(_rates, recipes), least), pairs)


def floors_near(recipes: Recipes, least: float = 0.0) -> list[Floors]:
    """The noise floors at every place in a list of recipes where neighbors are alike: from the nearest with a known spread."""
    every = [_rates(processes) for processes in recipes]
    within = {place: logs for place, p in enumerate(recipes) if (logs := _own_spread(p)) is not None}
    found = []
    for place, _ in enumerate(recipes):
        nearest = sorted(within, key=lambda other: abs(other - place))[: stats.NEAR]
        pairs = stats.floor_of([within[other] for other in nearest], least)
        found.append(Floors(stats.floor_near(every, place, least), pairs))
    return found


def unevenness(processes: Iterable[Timed]) -> float:
    """How many times the tokens of the emptiest sample the fullest one holds; 1 where they are all alike, or not known."""
    counts = [count for process in processes for count in process.tokens]
    if not counts or min(counts) == max(counts):
        return 1.0
    return max(counts) / min(counts) if min(counts) > 0 else math.inf


def _rates(processes: Sequence[Timed]) -> list[Sequence[float]]:
    return [process.rates for process in processes]


def _own_spread(processes: Sequence[Timed]) -> Array | None:
    """Log medians of the processes of one recipe, less the effect of their batches; None where that is not known."""
    if len(processes) < 2:
        return None
    if unevenness(processes) == 1:
        return stats.logs_of_medians(_rates(processes))
    kept = _sharing(processes, list(combinations(range(len(processes)), 2)))
    if kept is None:
        return None
    logs = _logs([processes[index] for index in kept])
    return np.asarray(np.median(logs - logs.mean(axis=0), axis=1), dtype=np.float64)


def _paired_logs(first: Sequence[Timed], second: Sequence[Timed]) -> tuple[Array, Array] | None:
    """Logarithms of the rates on the batches that both timed, a row for every process; None where they share too few.

    A process whose window lies elsewhere (it took longer to warm up) is left out, if that saves the others' batches.
    """
    both = [*first, *second]
    across = [(p, len(first) + q) for p in range(len(first)) for q in range(len(second))]
    kept = _sharing(both, across)
    if kept is None:
        return None
    logs, border = _logs([both[index] for index in kept]), sum(index < len(first) for index in kept)
    return logs[:border], logs[border:]


def _sharing(processes: Sequence[Timed], seeds: Sequence[tuple[int, int]]) -> list[int] | None:
    """The seed that shares most batches, and every further process that leaves enough of them; in their order."""
    best = max(seeds, key=lambda seed: len(_shared([processes[index] for index in seed])[0]))
    if not _shared([processes[index] for index in best])[0]:
        return None
    kept = list(best)
    for index in range(len(processes)):
        if index not in kept and _shared([processes[other] for other in (*kept, index)])[0]:
            kept.append(index)
    return sorted(kept)


def _logs(processes: Sequence[Timed]) -> Array:
    places = _shared(processes)
    rows = [[p.rates[place] for place in row] for p, row in zip(processes, places, strict=True)]
    return np.log(np.asarray(rows, dtype=np.float64))


def _shared(processes: Sequence[Timed]) -> list[list[int]]:
    """For each process the places of the samples on batches that all of them timed; no places if too few or not clear."""
    nothing: list[list[int]] = [[] for _ in processes]
    if len({process.span for process in processes}) > 1 or not all(process.tokens for process in processes):
        return nothing
    known = all(process.steps is not None for process in processes)
    places = _by_steps(processes) if known else _by_counts(processes)
    some = [column for column in zip(*places, strict=True) if processes[0].tokens[column[0]] > 0]
    places = [list(row) for row in zip(*some, strict=True)] or nothing
    counts = [[p.tokens[place] for place in row] for p, row in zip(processes, places, strict=True)]
    if any(row != counts[0] for row in counts):
        return nothing  # another order or another packing
    enough = max(LEAST_PAIRS, LEAST_SHARE * max(len(process.rates) for process in processes))
    return places if len(counts[0]) >= enough and len(set(counts[0])) > 1 else nothing


def _by_steps(processes: Sequence[Timed]) -> list[list[int]]:
    where = [{step: place for place, step in enumerate(process.steps or ())} for process in processes]
    common = sorted(set.intersection(*map(set, where)))
    return [[places[step] for step in common] for places in where]


def _by_counts(processes: Sequence[Timed]) -> list[list[int]]:
    """By the counts alone: the only alignment of each with the first. Either may have skipped one batch that the other timed."""
    first, partners = processes[0], []
    for other in processes[1:]:
        blocks = SequenceMatcher(None, first.tokens, other.tokens, autojunk=False).get_matching_blocks()
        partner = {b.a + index: b.b + index for b in blocks for index in range(b.size)}
        holes = [max(side) - min(side) + 1 - len(side) for side in (partner.keys(), partner.values()) if side]
        if max(holes, default=0) > 1:
            return [[] for _ in processes]
        partners.append(partner)
    common = [place for place, _ in enumerate(first.tokens) if all(place in p for p in partners)]
    return [common, *([partner[place] for place in common] for partner in partners)]
