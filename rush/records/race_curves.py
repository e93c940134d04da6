"""Curves of a race's runs: training time without warm-up, validation loss over tokens and time, when a loss was reached.

A leg is a separate process, and its first steps are slow: kernels are compiled, allocators and caches warm up. An uninterrupted
run pays for that once, a run in legs once per leg. So warm-up steps count with the median time of the other steps of their leg,
and the excess is reported separately. Validations, samples, saves and process start-up never count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from rush.records.race import RaceContender, RaceLeg, RaceRecord, RaceRun

SLOW = 1.25
"""The first step of a leg is warm-up, and every step after it until one takes less than this many times the leg's median."""
MOST_WARMUP = 0.5
"""At most this fraction of a leg's steps is warm-up: if later steps stay slow, that is the recipe's speed."""


@dataclass(frozen=True)
class LegTime:
    """The time of a leg's steps."""

    steps: int
    training_s: float
    """Every step, warm-up steps with the median of the others."""
    warmup_steps: int
    warmup_s: float
    """What the warm-up steps took beyond that."""
    around_s: float | None
    """The rest of the process: start-up, validations, the checkpoint; None if it was not recorded."""


@dataclass(frozen=True)
class RacePoint:
    """A validation: after how many tokens and seconds of training, and its loss."""

    tokens: float
    seconds: float
    loss: float


def leg_time(run: RaceRun, leg: RaceLeg) -> LegTime:
    """The time of one leg of a run."""
    counted, warm = _counted(run, leg)
    own = sum(run["step_s"][leg["first"] - 1 : leg["last"]])
    wall = leg.get("wall_s")
    around = None if wall is None else max(0.0, wall - own)
    return LegTime(len(counted), sum(counted), warm, max(0.0, own - sum(counted)), around)


def leg_tokens(record: RaceRecord, run: RaceRun, leg: RaceLeg) -> int:
    """The tokens of a leg."""
    if "tokens" in run:
        return sum(run["tokens"][leg["first"] - 1 : leg["last"]])
    return (leg["last"] - leg["first"] + 1) * contender_of(record, run["contender"])["step_tokens"]


def _counted(run: RaceRun, leg: RaceLeg) -> tuple[list[float], int]:
    """What each step of a leg counts, and how many of them are warm-up. Steps of other sizes are compared by their time per token."""
    steps = slice(leg["first"] - 1, leg["last"])
    step_s = run["step_s"][steps]
    sizes = run["tokens"][steps] if "tokens" in run else [1] * len(step_s)
    per_token, warm = _without_warmup([one / size for one, size in zip(step_s, sizes, strict=True)])
    return [one * size for one, size in zip(per_token, sizes, strict=True)], warm


def _without_warmup(step_s: Sequence[float]) -> tuple[list[float], int]:
    if len(step_s) < 2:
        return list(step_s), 0
    usual, warm = median(step_s[1:]), 1
    most = max(1, int(MOST_WARMUP * len(step_s)))
    while warm < most and step_s[warm] > SLOW * usual:
        warm += 1
    usual = median(step_s[warm:])
    return [min(one, usual) if place < warm else one for place, one in enumerate(step_s)], warm


def training_seconds(run: RaceRun) -> list[float]:
    """The training time after every step."""
    found, total = [], 0.0
    for leg in run["legs"]:
        for one in _counted(run, leg)[0]:
            total += one
            found.append(total)
    return found


def points_of(run: RaceRun) -> list[RacePoint]:
    """The validations of a run, in order."""
    seconds = training_seconds(run)
    return [
        RacePoint(float(one["tokens"]), seconds[one["step"] - 1], one["loss"]) for one in run["validations"]
    ]


def start_of(run: RaceRun) -> RacePoint | None:
    """Before any training: the loss of the first step's batch, which the initial weights made. It is of training text, and serves only
    to place what was reached before the first validation."""
    first = run["losses"][0] if run["losses"] else None
    return None if first is None else RacePoint(0.0, 0.0, first)


def reached(points: Sequence[RacePoint], loss: float, start: RacePoint | None = None) -> RacePoint | None:
    """Where the loss was first reached, between two validations by a straight line; None where it never was."""
    before = start if start is not None and start.loss > loss else None
    for one in points:
        if one.loss > loss:
            before = one
            continue
        if before is None:
            return one
        part = (before.loss - loss) / (before.loss - one.loss)
        return RacePoint(
            before.tokens + part * (one.tokens - before.tokens),
            before.seconds + part * (one.seconds - before.seconds),
            loss,
        )
    return None


def best_until(points: Sequence[RacePoint], tokens: float) -> float | None:
    """The lowest loss of all validations up to so many tokens."""
    return min((one.loss for one in points if one.tokens <= tokens), default=None)


def raced(record: RaceRecord, letter: str) -> dict[int, list[RacePoint]]:
    """The points of a contender's runs that learned something, by seed; a diverged or failed run is left out."""
    return {
        run["seed"]: points
        for run in record["runs"]
        if run["contender"] == letter
        and run["status"] not in ("diverged", "failed")
        and (points := points_of(run))
    }


def starts(record: RaceRecord, letter: str) -> dict[int, RacePoint | None]:
    """Where a contender's runs began, by seed."""
    return {run["seed"]: start_of(run) for run in record["runs"] if run["contender"] == letter}


def mean_curve(runs: Sequence[Sequence[RacePoint]]) -> list[RacePoint]:
    """The means over seeds at every validation that all of them have."""
    return [
        RacePoint(*(fmean(getattr(one, key) for one in same) for key in ("tokens", "seconds", "loss")))
        for same in zip(*runs, strict=False)
    ]


def contender_of(record: RaceRecord, letter: str) -> RaceContender:
    return next(one for one in record["contenders"] if one["letter"] == letter)


def interval(value: Mapping[str, Any] | None) -> tuple[float, float] | None:
    """The interval of a quotient or gap; None where there is none, as with one seed."""
    ends = value.get("ci95") if value else None
    if not isinstance(ends, list) or len(ends) != 2:
        return None
    return float(ends[0]), float(ends[1])
