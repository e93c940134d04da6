"""The record of a race: `race.json`, with the contenders, every leg of every run, and the findings.

Losses and step times of every step are stored as measured: everything else is computed from them (`race_curves.py`), so that
pages and findings can be recomputed.
"""

from __future__ import annotations

from typing import Annotated, Any, Required

from pydantic import AfterValidator, Field, SkipValidation, TypeAdapter
from typing_extensions import TypedDict

from rush.records.typed import RecordFile, one_of

FORMAT = 1
FILE = "race.json"
STATUSES = ("waiting", "running", "ok", "reached", "diverged", "failed", "killed")
"""Statuses of a run. `ok`: trained on all its tokens; `reached`: stopped at the requested loss; `killed`: from outside, and
retried when the race is resumed."""
ENDED = ("ok", "reached", "diverged", "failed")
Positive = Annotated[int, Field(gt=0)]
Interval = Annotated[list[float], Field(min_length=2, max_length=2)]


class RaceContender(TypedDict, total=False):
    """A recipe of the race."""

    letter: Required[str]
    name: Required[str]
    recipe: Required[str]
    """As TOML, as it was given: without the changes that the race makes to the schedule and the seed."""
    digest: Required[str]
    step_tokens: Required[Positive]
    """With a batch-size schedule, of the last steps."""
    step_sizes: SkipValidation[list[int]]
    """Tokens of a step in the course of the run; several with a batch-size schedule."""
    steps: Required[Positive]
    """Steps of a run of the race."""
    techniques: SkipValidation[list[Any]]


class RaceLeg(TypedDict, total=False):
    """Steps of one process, `first` to `last`."""

    first: Required[Positive]
    last: Required[Positive]
    place: SkipValidation[int | None]
    """Its index among all legs in chronological order."""
    started: SkipValidation[str | None]
    wall_s: SkipValidation[float | None]
    """From the start of the process to its end; None where the race was killed before it was noted."""
    load: SkipValidation[float | None]
    """Load average per core when it ended."""


class RaceValidation(TypedDict):
    step: Positive
    tokens: Positive
    loss: float


class RaceRun(TypedDict, total=False):
    """A contender with a seed."""

    contender: Required[str]
    seed: Required[int]
    status: Required[Annotated[str, one_of(*STATUSES)]]
    reason: SkipValidation[str | None]
    legs: Required[list[RaceLeg]]
    losses: Required[list[float | None]]
    """Loss of every step; None if it is non-finite."""
    step_s: Required[list[Annotated[float, Field(ge=0)]]]
    tokens: list[Positive]
    """Tokens of every step, if they differ."""
    validations: Required[list[RaceValidation]]


def _consistent(run: RaceRun) -> RaceRun:
    """Legs follow each other, and cover the steps that are there."""
    done = 0
    for leg in run["legs"]:
        if leg["first"] != done + 1 or leg["last"] < leg["first"]:
            raise ValueError(f"a leg from step {leg['first']} to {leg['last']} follows step {done}")
        done = leg["last"]
    if not len(run["losses"]) == len(run["step_s"]) == done:
        raise ValueError(
            f"its legs end at step {done}, with {len(run['losses'])} losses and {len(run['step_s'])} times"
        )
    if len(run.get("tokens", run["step_s"])) != done:
        raise ValueError(f"its legs end at step {done}, with the tokens of {len(run['tokens'])} steps")
    steps = [one["step"] for one in run["validations"]]
    if steps != sorted(set(steps)) or (steps and steps[-1] > done):
        raise ValueError(f"its validations are not in order, or later than step {done}")
    return run


class Quotient(TypedDict, total=False):
    """A ratio over seeds: the geometric mean, with an interval where there are several."""

    ratio: Required[float]
    ci95: Interval | None
    samples: Required[list[float]]


class LossGap(TypedDict, total=False):
    """A contender's validation loss less the first one's, at the same tokens: the mean over seeds."""

    tokens: Required[int]
    gap: Required[float]
    ci95: Interval | None
    samples: Required[list[float]]
    relative: SkipValidation[float]
    """To the first one's loss."""


class DepthRecord(TypedDict, total=False):
    """A loss, and what each contender needed to reach it, as means over seeds; each seed has a loss of its own. Quotients are the first one's over the contender's:
    above 1 it was there sooner, or with fewer tokens."""

    name: Required[str]
    loss: Required[float]
    tokens: Required[dict[str, float | None]]
    seconds: Required[dict[str, float | None]]
    net: Required[dict[str, Quotient | None]]
    tokens_ratio: Required[dict[str, Quotient | None]]


class RaceFinding(TypedDict, total=False):
    """A contender against the first one, or where that diverged or failed, the next."""

    contender: Required[str]
    against: Required[str]
    gross: Required[Quotient | None]
    """Tokens per second over the first one's, leg by leg."""
    net: Required[Quotient | None]
    """The first one's time to the same loss over this one's, at the last depth."""
    more_tokens: Required[Quotient | None]
    """This one's tokens to the same loss over the first one's, at the last depth: 1.03 is 3 % more."""
    gaps: Required[list[LossGap]]


class NetRecord(TypedDict, total=False):
    """The result of a race for a rung or a winner, as their records store it."""

    verdict: str
    against: str
    tokens: int
    seeds: int
    gross: Quotient | None
    net: Quotient | None
    more_tokens: Quotient | None
    gap: LossGap | None
    race: str
    """The folder of the race."""


class RaceRecord(TypedDict, total=False):
    format: int
    name: Required[str]
    started: Required[str]
    finished: SkipValidation[str | None]
    why_ended: SkipValidation[str | None]
    """Why it ended before its tokens: the loss, the time."""
    machine: Required[dict[str, Any]]
    contenders: Required[Annotated[list[RaceContender], Field(min_length=2)]]
    seeds: Required[Annotated[list[int], Field(min_length=1)]]
    tokens: Required[Positive]
    """Tokens of every run."""
    every_tokens: Required[Positive]
    """Between two validations."""
    num_legs: Required[Positive]
    until_loss: SkipValidation[float | None]
    budget_s: SkipValidation[float | None]
    spent_s: SkipValidation[float]
    """Wall-clock time of all legs with their overhead, over all attempts."""
    validate_sequences: Required[Positive]
    sequence: Required[Positive]
    corpus: Required[dict[str, Any]]
    differences: SkipValidation[list[list[str]]]
    """Keys on which the recipes differ, each with every contender's value."""
    runs: Required[list[Annotated[RaceRun, AfterValidator(_consistent)]]]
    depths: Required[list[DepthRecord]]
    findings: Required[list[RaceFinding]]


RACE = RecordFile(TypeAdapter(RaceRecord), FILE, "race", "rush race")
read_race, write_race, check_race = RACE.read, RACE.write, RACE.check
