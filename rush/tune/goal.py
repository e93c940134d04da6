"""The objective of a search, the result of a trial, and when one recipe is ahead of another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rush.errors import RecipeError, nearest
from rush.lab.paired import Floors, Timed, compare
from rush.lab.statistics import Floor, Ratio, center
from rush.techniques import Parity
from rush.tune.forecast import Prediction

OBJECTIVES = {
    "tokens/s": "most tokens per second (in fine-tuning: tokens with a label)",
    "memory": "lowest peak memory at no less than --keep-speed of the recipe's own speed",
    "cost": "lowest cost per token at --price; on one machine the fastest recipe is the cheapest",
    "longest-sequence": "the longest batch.sequence that fits, at a micro batch of 1",
}
SLOW = 2.0
"""A trial this many times slower than one that could win is ended early."""
LEAST = 0.01
"""Smaller differences are noise: processes of one recipe differ as much."""


def parity_classes(allow: Sequence[str] | None) -> frozenset[Parity]:
    """Parity classes by name; by default all but `changes`."""
    names = [parity.name.lower() for parity in Parity]
    wanted = allow or [name for name in names if name != "changes"]
    for name in wanted:
        if name.lower() not in names:
            raise RecipeError(f"--allow is {name!r}; {nearest(name, names)}")
    return frozenset(Parity[name.upper()] for name in wanted)


@dataclass(frozen=True)
class TuneResult:
    status: str
    """One of `rush.records.ladder.STATUSES`."""
    reason: str | None = None
    rates: Sequence[float] = ()
    """Tokens per second of each sample."""
    peak_memory_bytes: int = 0
    wall_s: float = 0.0
    evidence: Sequence[Mapping[str, Any]] = ()
    parity: Mapping[str, Any] | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    """Which tokens were `counted`, how many were `processed` per second, the fraction of a step that `waits` for data, whether the
    trial was `hopeless` and ended early, and the machine's `load`."""
    batches: Sequence[Timed] = ()
    """The rates of each trial with their batches; empty where these are not known."""

    @property
    def ok(self) -> bool:
        return self.status == "ok" and bool(self.rates)

    @property
    def speed(self) -> float:
        return center([self.rates])

    def pooled(self, other: TuneResult) -> TuneResult:
        """This trial pooled with another of the same recipe."""
        most = max(self.peak_memory_bytes, other.peak_memory_bytes)
        known = bool(self.batches and other.batches)
        return replace(
            self,
            rates=(*self.rates, *other.rates),
            peak_memory_bytes=most,
            batches=(*self.batches, *other.batches) if known else (),
        )

    @property
    def failure(self) -> str:
        words = self.status.replace("_", " ")
        return f"{words}: {self.reason}" if self.reason else words

    @property
    def without_effect(self) -> list[str]:
        return [str(row["technique"]) for row in self.evidence if not row["took_effect"]]


@dataclass(frozen=True)
class TrialLimit:
    """When to end a trial early."""

    seconds: float
    patient: bool = False
    """Whether running into the limit is a result: long enough to call the trial slow."""
    slowest: float = 0.0
    """Tokens per second below which a trial has lost and is ended."""


@dataclass(frozen=True)
class Goal:
    objective: str = "tokens/s"
    keep_speed: float = 0.8
    """With the objective memory: the lowest speed allowed, as a fraction of the first recipe's."""

    def ratio(self, new: TuneResult, old: TuneResult) -> float:
        """Above 1 is better."""
        if self.objective == "memory":
            return old.peak_memory_bytes / max(1, new.peak_memory_bytes)
        return gain(old, new).ratio

    def fast_enough(self, new: TuneResult, start: TuneResult) -> bool:
        return self.objective != "memory" or new.speed >= self.keep_speed * start.speed

    def slowest(self, lead: TuneResult, start: TuneResult) -> float:
        """Tokens per second below which a trial has lost."""
        needed = self.keep_speed * start.speed if self.objective == "memory" else lead.speed
        return needed / SLOW

    def ahead(self, new: TuneResult, lead: TuneResult, start: TuneResult) -> bool:
        """Whether a trial is better than the lead's by more than the noise."""
        if self.objective == "memory":
            return self.fast_enough(new, start) and self.ratio(new, lead) > 1 + LEAST
        return gain(lead, new).faster

    def expected(self, new: Prediction, lead: Prediction, start: Prediction) -> float:
        """The predicted ratio; 0 if it is too slow."""
        if self.objective == "memory":
            slow = new.tokens_per_s < self.keep_speed * start.tokens_per_s
            return 0.0 if slow else lead.memory_bytes / new.memory_bytes
        return new.tokens_per_s / lead.tokens_per_s


def gain(before: TuneResult, after: TuneResult) -> Ratio:
    """The ratio of two speeds with its interval, from paired batches where possible."""
    floor = Floor(0.0, 0, LEAST)
    floors = Floors(floor, floor)
    if before.batches and after.batches:
        paired = compare(before.batches, after.batches, floors)
        if paired.paired is not None:
            return paired
    return compare([Timed(before.rates)], [Timed(after.rates)], floors)
