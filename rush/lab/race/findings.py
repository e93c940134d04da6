"""The findings of a race: time and tokens to the same loss, gross and net, the gap at equal tokens, with intervals over seeds.

Gross is tokens per second; net is the time to the same loss. A recipe may be faster gross and slower net: its steps are
shorter, but the model learns less per step. Time and tokens are compared at the losses that all contenders had reached after a
quarter, a half, three quarters and all of the tokens, with the same seed: the last is the highest final loss.

Seeds are the samples: runs with the same seed read the same text in the same order, so contenders are compared seed by seed.
The bootstrap alone would understate the uncertainty of a few seeds, so its interval is widened by Student's distribution for
their number. One seed has no interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np

from rush.lab.statistics import DRAWS, student_quantile
from rush.records.race import DepthRecord, LossGap, Quotient, RaceFinding, RaceRecord
from rush.records.race_curves import RacePoint, best_until, leg_time, leg_tokens, raced, reached, starts

FRACTIONS = {0.25: "a quarter", 0.5: "half", 0.75: "three quarters", 1.0: "all"}
_STUDENT = {1: 12.706, 2: 4.303}
"""Student's 97.5 % points for fewer than three degrees of freedom."""
Points = Mapping[int, Sequence[RacePoint]]


def findings_of(record: RaceRecord) -> tuple[list[DepthRecord], list[RaceFinding]]:
    """The depths, and every other contender against the first that came so far. Empty until at least two contenders have been validated."""
    letters = [one["letter"] for one in record["contenders"]]
    points = {letter: found for letter in letters if (found := raced(record, letter))}
    if len(points) < 2:
        return [], []
    base = next(iter(points))
    points = _same_seeds(points)
    if not points[base]:
        return [], []
    depths = _depths(record, points, base)
    others = [letter for letter in points if letter != base]
    return depths, [_finding(record, depths, points, base, letter) for letter in others]


def _same_seeds(points: dict[str, dict[int, list[RacePoint]]]) -> dict[str, dict[int, list[RacePoint]]]:
    """Only seeds that all contenders have raced with."""
    both = set.intersection(*(set(found) for found in points.values()))
    return {letter: {seed: found[seed] for seed in sorted(both)} for letter, found in points.items()}


def _depths(record: RaceRecord, points: Mapping[str, Points], base: str) -> list[DepthRecord]:
    """The losses that all contenders had reached by then, seed by seed: the effect of a seed is common to all."""
    common = min(run[-1].tokens for found in points.values() for run in found.values())
    named: list[tuple[str, dict[int, float]]] = []
    for fraction, words in FRACTIONS.items():
        losses = {}
        for seed in points[base]:
            lowest = [best_until(found[seed], fraction * common) for found in points.values()]
            if None not in lowest:
                losses[seed] = max(loss for loss in lowest if loss is not None)
        if len(losses) == len(points[base]):
            named.append((f"after {words} {'of the tokens' if fraction < 1 else 'tokens'}", losses))
    if (goal := record.get("until_loss")) is not None:
        named.append(("as asked for", dict.fromkeys(points[base], goal)))
    found = []
    for name, losses in named:
        places = {
            letter: {
                seed: place
                for seed, run in runs.items()
                if (place := reached(run, losses[seed], starts(record, letter).get(seed))) is not None
            }
            for letter, runs in points.items()
        }
        found.append(_depth(name, fmean(losses.values()), points, places, base))
    return found


def _depth(
    name: str,
    loss: float,
    points: Mapping[str, Points],
    places: Mapping[str, Mapping[int, RacePoint]],
    base: str,
) -> DepthRecord:

    def mean(letter: str, key: str) -> float | None:
        whole = len(places[letter]) == len(points[letter])
        return fmean(getattr(place, key) for place in places[letter].values()) if whole else None

    def against(letter: str, key: str) -> Quotient | None:
        ours, theirs = places[base], places[letter]
        if letter == base or len(ours) < len(points[base]) or len(theirs) < len(points[letter]):
            return None
        return quotient([getattr(ours[seed], key) / getattr(theirs[seed], key) for seed in ours])

    return {
        "name": name,
        "loss": loss,
        "tokens": {letter: mean(letter, "tokens") for letter in points},
        "seconds": {letter: mean(letter, "seconds") for letter in points},
        "net": {letter: against(letter, "seconds") for letter in points},
        "tokens_ratio": {letter: against(letter, "tokens") for letter in points},
    }


def _finding(
    record: RaceRecord, depths: Sequence[DepthRecord], points: Mapping[str, Points], base: str, letter: str
) -> RaceFinding:
    last = next((depth for depth in reversed(depths) if depth["net"].get(letter)), None)
    fewer = last["tokens_ratio"][letter] if last else None
    return {
        "contender": letter,
        "against": base,
        "gross": _gross(record, base, letter),
        "net": last["net"][letter] if last else None,
        "more_tokens": None if fewer is None else quotient([1 / one for one in fewer["samples"]]),
        "gaps": _gaps(points[base], points[letter]),
    }


def _gross(record: RaceRecord, base: str, letter: str) -> Quotient | None:
    """Tokens per second of training, leg by leg with the same seed and number: both were made one after the other."""
    rates: dict[str, dict[tuple[int, int], float]] = {base: {}, letter: {}}
    for run in record["runs"]:
        if run["contender"] in rates and run["status"] not in ("diverged", "failed"):
            ends = 0
            for leg in run["legs"]:
                time, tokens = leg_time(run, leg), leg_tokens(record, run, leg)
                ends += tokens
                if time.training_s > 0:
                    rates[run["contender"]][run["seed"], ends] = tokens / time.training_s
    both = [place for place in rates[base] if place in rates[letter]]
    return quotient([rates[letter][place] / rates[base][place] for place in both])


def _gaps(first: Points, other: Points) -> list[LossGap]:
    """The validation loss less the first one's, after a quarter, a half, three quarters and all of the tokens."""
    common = [
        {one.tokens for one in first[seed]} & {one.tokens for one in other[seed]}
        for seed in first
        if seed in other
    ]
    shared = sorted(set.intersection(*common)) if common else []
    gaps: list[LossGap] = []
    for tokens in dict.fromkeys(_nearest(shared, fraction) for fraction in FRACTIONS if shared):
        pairs = [
            (
                next(p.loss for p in first[seed] if p.tokens == tokens),
                next(p.loss for p in other[seed] if p.tokens == tokens),
            )
            for seed in first
        ]
        samples = [theirs - ours for ours, theirs in pairs]
        middle = fmean(samples)
        gaps.append(
            {
                "tokens": int(tokens),
                "gap": middle,
                "ci95": mean_interval(samples),
                "samples": samples,
                "relative": middle / fmean(ours for ours, _ in pairs),
            }
        )
    return gaps


def _nearest(places: Sequence[float], fraction: float) -> float:
    return min(places, key=lambda place: abs(place - fraction * places[-1]))


def quotient(samples: Sequence[float]) -> Quotient | None:
    """A ratio from its samples: their geometric mean."""
    if not samples:
        return None
    logs = [math.log(one) for one in samples]
    ends = mean_interval(logs)
    return {
        "ratio": math.exp(fmean(logs)),
        "ci95": None if ends is None else [math.exp(end) for end in ends],
        "samples": list(samples),
    }


def mean_interval(samples: Sequence[float], seed: int = 0) -> list[float] | None:
    """The 95 % interval of the mean: by the bootstrap, widened for few samples; None for a single one."""
    count = len(samples)
    if count < 2:
        return None
    values = np.asarray(samples, dtype=np.float64)
    drawn = values[np.random.default_rng(seed).integers(count, size=(DRAWS, count))].mean(axis=1)
    student = _STUDENT.get(count - 1) or student_quantile(count - 1)
    wider = student / 1.959964 * math.sqrt(count / (count - 1))
    middle = float(values.mean())
    low, high = (middle + wider * (float(end) - middle) for end in np.quantile(drawn, (0.025, 0.975)))
    return [min(low, middle), max(high, middle)]
