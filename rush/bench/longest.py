"""How long a sequence fits into a given memory, found with few trials.

A step of a hundred thousand tokens takes a minute, so there is no bisection: memory is linear in the length,
two short trials determine the line, and the third runs where the line meets the limit, with a small margin.
If that does not fit (fragmentation), a slightly shorter one is tried. Everything reported was run: the
longest that fitted, with its time and memory, and the shortest that did not. Steps of that length take
minutes, so there is only one, including compilation: its speed is a lower bound. Evidence, parity and the
short life are checked at the shortest length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rush.bench.workloads import WorkloadSpec
from rush.lab.ladder.ladder_file import LadderPlan, SearchConfig, change
from rush.lab.parity.judge import parity_with_plain
from rush.lab.trial.runner import Bench
from rush.lab.trial.timing import rates
from rush.lab.trial.trial import Outcome
from rush.recipe import Recipe
from rush.recipe_io import parse, write_toml
from rush.records.life import LifeRecord
from rush.records.models import LengthRecord, ProcessTime, WorkloadRecord

GRAIN = 1024
"""Lengths are multiples of this, where they are longer than it."""
ROOM = 0.97
"""Fraction of the memory limit that the extrapolated length may take."""
SHORTER = 0.95
RETRIES = 3


class LongestSequence:
    """One workload for the longest sequence."""

    def __init__(self, workload: WorkloadSpec, bench: Bench) -> None:
        assert workload.longest is not None
        self.workload, self.wanted, self.ours = workload, workload.longest, workload.ours[0]
        # A short length takes three steps: the first, one to warm up, one that is timed.
        short = workload.measure.model_copy(update={"windows": 1, "window_ms": 1.0, "warmup_max_steps": 1})
        long = workload.measure.model_copy(update={"windows": 0})
        plan = LadderPlan(workload.name, self.ours.recipe, (), short, self.ours.parity, SearchConfig())
        self.bench = replace(bench, plan=plan)
        self.long_bench = replace(bench, plan=replace(plan, measure=long))
        limit_gb = self.ours.recipe.run.memory_limit_gb
        self.limit_bytes = int(limit_gb * 1e9) if limit_gb else bench.machine.memory_bytes
        self.tried: dict[int, Outcome] = {}
        self.parity: dict[str, Any] | None = None
        self.reference: Outcome | None = None
        self.life: LifeRecord | None = None
        self._next = 0

    def rounds(self) -> Iterator[str]:
        """The next lengths: the probes, then the predicted length, then shorter ones until one fits."""
        for size in self.wanted.probes:
            yield self._ask(size)
            if not self._fits(size):
                return
        size = self.predicted()
        for _ in range(1 + RETRIES):
            if size in self.tried:
                return
            yield self._ask(size)
            if self._fits(size):
                return
            size = self._rounded(size * SHORTER)

    def go(self) -> None:
        """Try the length that `rounds` has just named."""
        size, first = self._next, self._next == self.wanted.probes[0]
        recipe, bench = self.recipe(size), self.bench if size in self.wanted.probes else self.long_bench
        self.tried[size] = bench.run(recipe, "length", first=first)
        if first and self._fits(size):
            self.parity, self.reference = parity_with_plain(bench, recipe, self.tried[size], recipe)
            self.life = bench.life(recipe)

    def recipe(self, size: int) -> Recipe:
        """Our recipe at this length, the model's context stretched to it where it is shorter."""
        tree = self.ours.recipe.model_dump(exclude_none=True)
        context = max(size, self.ours.recipe.shape().context)
        change(
            tree,
            {
                "batch.sequence": size,
                "batch.total_tokens": "none",
                "batch.schedule": "none",
                "model.shape.context": context,
            },
        )
        return parse(tree)

    def predicted(self) -> int:
        """Where the line through the two longest that fitted meets the limit."""
        known = sorted((size, self._peak(size)) for size in self.tried if self._fits(size))
        (first, low), (second, high) = known[-2:]
        slope = max((high - low) / (second - first), 1e-9)
        size = second + (ROOM * self.limit_bytes - high) / slope
        return max(second, self._rounded(min(size, self.wanted.up_to or size)))

    def record(self) -> WorkloadRecord:
        """Everything known so far."""
        recipe, first = self.ours.recipe, self.wanted.probes[0]
        tried = [self._point(size) for size in sorted(self.tried)]
        fitted = [point for point in tried if point["status"] == "ok"]
        return {
            "name": self.workload.name,
            "about": self.workload.about,
            "micro": recipe.micro,
            "sequence": fitted[-1]["sequence"] if fitted else recipe.batch.sequence,
            "longest": {
                "techniques": [name for name, _ in recipe.technique_uses()],
                "recipe": write_toml(recipe),
                "limit_bytes": self.limit_bytes,
                "published": self.wanted.published,
                "source": self.wanted.source,
                "found": fitted[-1] if fitted else None,
                "fails_at": next((p["sequence"] for p in tried if p["status"] == "out_of_memory"), None),
                "tried": tried,
                "evidence": self.tried[first].found.get("evidence", []) if first in self.tried else [],
                "parity": self.parity,
                "life": self.life,
            },
            "took": [
                *(took(f"{size:,} tokens", outcome) for size, outcome in self.tried.items()),
                *([took("fp32", self.reference)] if self.reference is not None else []),
                *([life_took("a short life", self.life)] if self.life is not None else []),
            ],
        }

    def _ask(self, size: int) -> str:
        self._next = size
        return f"a sequence of {size:,} tokens"

    def _fits(self, size: int) -> bool:
        return self.tried[size].status == "ok"

    def _peak(self, size: int) -> int:
        return int(self.tried[size].found["timing"]["peak_memory_bytes"])

    def _rounded(self, size: float) -> int:
        return int(size) // GRAIN * GRAIN if size > GRAIN else int(size)

    def _point(self, size: int) -> LengthRecord:
        outcome = self.tried[size]
        timing = outcome.found.get("timing")
        return {
            "sequence": size,
            "status": outcome.status,
            "reason": outcome.reason,
            "tokens_per_s": rates(timing)[0] if timing else None,
            "step_s": timing["samples_s"][0] if timing else None,
            "cold": bool(timing.get("cold")) if timing else False,
            "peak_memory_bytes": timing["peak_memory_bytes"] if timing else None,
        }


def took(who: str, outcome: Outcome) -> ProcessTime:
    """How long a trial ran, and what it spent its time on."""
    return {"who": who, "wall_s": round(outcome.wall_s, 1), "parts": dict(outcome.found.get("seconds", {}))}


def life_took(who: str, life: LifeRecord) -> ProcessTime:
    """How long a life took."""
    parts = {part["name"]: part["seconds"] for part in life["parts"]}
    return {"who": who, "wall_s": round(sum(parts.values()), 1), "parts": parts}
