"""What a search is for, what a trial came to, and when one recipe is ahead of another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rush.lab.paired import Floors, Timed, compare
from rush.lab.statistics import Floor, Ratio, centre
from rush.tune.forecast import Prediction

OBJECTIVES = {
    "tokens/s": "most tokens per second (of fine-tuning: tokens learned from)",
    "memory": "least peak memory at no less than --keep-speed of the recipe's own speed",
    "cost": "least money per token at --price for an hour of the device; on one machine what is fastest is cheapest",
    "longest-sequence": "the longest batch.sequence that fits, at a micro batch of 1",
}
SLOW = 2.0
"""A trial that is so many times slower than one that could win is not timed to the end."""
LEAST = 0.01
"""A difference below this is never believed: processes of one recipe lie as far apart."""


@dataclass(frozen=True)
class TuneResult:
    """What one trial came to."""

    status: str
    """One of the record's statuses; `ok` has figures."""
    reason: str | None = None
    rates: Sequence[float] = ()
    """Tokens per second of each window."""
    peak_memory_bytes: int = 0
    wall_s: float = 0.0
    evidence: Sequence[Mapping[str, Any]] = ()
    parity: Mapping[str, Any] | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    """What else a timing says: which tokens were `counted`, how many are `processed` in a second, the share of a step that
    `waits` for data, whether it was `hopeless` and ended early, the machine's `load`."""
    batches: Sequence[Timed] = ()
    """The same rates with the batches they were taken on, of each trial that they are of; empty where that is not known."""

    @property
    def ok(self) -> bool:
        return self.status == "ok" and bool(self.rates)

    @property
    def speed(self) -> float:
        return centre([self.rates])

    def pooled(self, other: TuneResult) -> TuneResult:
        """This trial and another of the same recipe as one."""
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
    """When a trial is ended before it is done."""

    seconds: float
    patient: bool = False
    """Whether that was long enough to call it slow; a trial that did not end in time is then a result."""
    slowest: float = 0.0
    """Tokens per second; one that is slower has lost, and is ended as soon as that is plain."""


@dataclass(frozen=True)
class Goal:
    objective: str = "tokens/s"
    keep_speed: float = 0.8
    """With the objective memory: the least share of the first recipe's speed."""

    def ratio(self, new: TuneResult, old: TuneResult) -> float:
        """How much better; above 1 is better."""
        if self.objective == "memory":
            return old.peak_memory_bytes / max(1, new.peak_memory_bytes)
        return gain(old, new).ratio

    def fast_enough(self, new: TuneResult, start: TuneResult) -> bool:
        return self.objective != "memory" or new.speed >= self.keep_speed * start.speed

    def slowest(self, lead: TuneResult, start: TuneResult) -> float:
        """Tokens per second below which a trial has plainly lost."""
        needed = self.keep_speed * start.speed if self.objective == "memory" else lead.speed
        return needed / SLOW

    def ahead(self, new: TuneResult, lead: TuneResult, start: TuneResult) -> bool:
        """Whether a trial is better than the lead's by more than chance gives."""
        if self.objective == "memory":
            return self.fast_enough(new, start) and self.ratio(new, lead) > 1 + LEAST
        return gain(lead, new).faster

    def expected(self, new: Prediction, lead: Prediction, start: Prediction) -> float:
        """How much better by prediction; 0 for one that is too slow."""
        if self.objective == "memory":
            slow = new.tokens_per_s < self.keep_speed * start.tokens_per_s
            return 0.0 if slow else lead.memory_bytes / new.memory_bytes
        return new.tokens_per_s / lead.tokens_per_s


def gain(before: TuneResult, after: TuneResult) -> Ratio:
    """The quotient of two speeds with its interval: batch by batch where batches differ and both were timed on the same ones."""
    floor = Floor(0.0, 0, LEAST)
    floors = Floors(floor, floor)
    if before.batches and after.batches:
        paired = compare(before.batches, after.batches, floors)
        if paired.paired is not None:
            return paired
    return compare([Timed(before.rates)], [Timed(after.rates)], floors)
