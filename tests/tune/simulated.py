"""A machine that answers from a table: what was measured on an H200, as factors that multiply."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from rush.plan.target import target_of
from rush.recipe import Recipe
from rush.recipe_io import changed
from rush.records.life import LifePart, LifeRecord
from rush.techniques import Parity
from rush.tune.budget import Budget
from rush.tune.forecast import Planner
from rush.tune.goal import Goal, TrialLimit, TuneResult
from rush.tune.moves import Rules, named
from rush.tune.outlook import Outlook, jumps
from rush.tune.search import Search
from rush.tune.trials import kept_of, trial_tokens

LADDER = Path(__file__).parents[2] / "results" / "llama-3.2-1b-h200" / "ladder.json"
LEARNS_THE_SAME = frozenset({Parity.EXACT, Parity.CLOSE, Parity.STATISTICAL})


def measured_factors() -> dict[str, float]:
    """What each rung of the ladder on an H200 gained over the one it stood on."""
    return {
        rung["name"]: rung["gain"]["ratio"]
        for rung in json.loads(LADDER.read_text())["rungs"]
        if rung.get("gain")
    }


def measured_batches() -> dict[int, float]:
    """Speed by micro batch, over that of 8."""
    points = {p["micro"]: p["tokens_per_s"]["median"] for p in json.loads(LADDER.read_text())["batch_curve"]}
    return {micro: speed / points[8] for micro, speed in points.items()}


@dataclass
class Table:
    """Trials by multiplication, with noise, taking the time that trials took there."""

    factors: Mapping[str, float]
    batches: Mapping[int, float]
    plain: float = 4668.0
    noise: float = 0.004
    different: tuple[frozenset[str], ...] = ()
    """Techniques, named with their knobs, that together learn something else."""
    idle: tuple[str, ...] = ()
    breaks: frozenset[str] = frozenset()
    """Techniques with which a life breaks off; its message names them."""
    made: list[tuple[str, str]] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def speed(self, recipe: Recipe) -> float:
        value = self.plain
        uses = dict(recipe.technique_uses())
        for name, knobs in uses.items():
            if name == "tf32" and any(other.endswith(("bf16", "fp16", "bf16_master")) for other in uses):
                continue
            value *= self.factors.get(named(name, knobs), self.factors.get(name, 1.0))
        nearest = min(self.batches, key=lambda micro: abs(micro - recipe.batch.micro))
        return value * self.batches[nearest]

    def reference(self, limit_s: float) -> TuneResult:
        return TuneResult("ok", wall_s=45.0)

    def trial(self, kind: str, recipe: Recipe, limit: TrialLimit) -> TuneResult:
        self.made.append((kind, recipe.digest))
        names = {named(name, knobs) for name, knobs in recipe.technique_uses()}
        wall_s = (
            15.0 if kind == "confirm" else 30.0 if any(name.startswith("compile") for name in names) else 10.0
        )
        process = self.rng.gauss(1, self.noise)
        rates = [self.speed(recipe) * process * self.rng.gauss(1, self.noise / 2) for _ in range(5)]
        parity: dict[str, Any] | None = None
        evidence: list[dict[str, Any]] = []
        if kind == "prove":
            wall_s += 20.0
            other = any(group <= names for group in self.different)
            parity = {
                "verdict": "different" if other else "equal",
                "why": "the table says so",
                "class": "CLOSE",
            }
            evidence = [
                {"technique": name.split("(")[0], "took_effect": name not in self.idle, "what": ""}
                for name in names
            ]
        return TuneResult("ok", None, rates, 2**30, wall_s, evidence, parity)

    def life(self, recipe: Recipe, limit_s: float) -> LifeRecord:
        self.made.append(("life", recipe.digest))
        names = sorted(self.breaks.intersection(name for name, _ in recipe.technique_uses()))
        problem = "it cannot validate: the table says so." if names else None
        parts: list[LifePart] = [{"name": "train", "seconds": 12.0}]
        parts += [] if names else [{"name": "resume", "seconds": 8.0}]
        return {
            "verdict": "broken" if names else "ok",
            "problem": problem,
            "parts": parts,
            "techniques": names,
        }


@cache
def planner_of(machine: str) -> Planner:
    return Planner(target_of(machine))


def search_for(
    recipe: Recipe,
    table: Table,
    budget_s: float = 900.0,
    known: Mapping[str, float] | None = None,
    allowed: frozenset[Parity] = LEARNS_THE_SAME,
    goal: Goal | None = None,
    machine: str = "h200-sxm",
) -> Search:
    """A search on a machine of the catalogue; its clock stands still, so only trials take time."""
    planner, budget = planner_of(machine), Budget(budget_s, clock=lambda: 0.0)
    whole = changed(recipe, {"batch.total_tokens": recipe.step_tokens})
    rules = Rules(planner.target.machine(), allowed, kept_of(whole), whole.step_tokens)
    outlook = Outlook(whole, planner, goal or Goal(), known or {}, rules.kept)
    tokens = trial_tokens(whole, jumps(outlook, whole, rules), planner)
    return Search(whole, replace(rules, tokens=tokens), table, outlook, budget)
