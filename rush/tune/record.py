"""The record of a search, and the winner as a recipe file."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rush.lab.ladder.findings import measured
from rush.lab.statistics import median_interval
from rush.recipe import Recipe
from rush.recipe_io import write_toml
from rush.records.gains import over_original
from rush.records.tune import FORMAT, CandidateRow, TuneRecord, mark
from rush.techniques import Parity
from rush.tune.candidates import Candidate
from rush.tune.goal import Goal
from rush.tune.moves import Refusal, describe, named
from rush.tune.search import Search
from rush.tune.trials import TuneSettings


@dataclass(frozen=True)
class Request:
    """The user's request."""

    name: str
    recipe: Recipe
    goal: Goal
    allowed: frozenset[Parity]
    budget_s: float
    price: float | None = None
    beside: Mapping[str, Recipe] = field(default_factory=dict)
    """Hand-written recipes, by name, that the winner is compared with after the search."""


def classes(allowed: frozenset[Parity]) -> list[str]:
    return [one.name.lower() for one in Parity if one in allowed]


def record_of(
    request: Request,
    search: Search,
    settings: TuneSettings,
    known: dict[str, float],
    started: str,
    gone: Sequence[Refusal],
) -> TuneRecord:
    first = search.candidates[0].results.get("rank") if search.candidates else None
    return {
        "format": FORMAT,
        "name": request.name,
        "started": started,
        "finished": None,
        "machine": search.rules.machine.to_dict(),
        "fingerprint": search.rules.machine.fingerprint(),
        "objective": request.goal.objective,
        "keep_speed": request.goal.keep_speed,
        "allowed": classes(request.allowed),
        "budget_s": request.budget_s,
        "spent_s": search.budget.spent_s,
        "load": _load(search),
        "price": request.price,
        "settings": asdict(settings),
        "known": dict(known),
        "base": {"recipe": write_toml(request.recipe), "digest": request.recipe.digest},
        "counted": str(first.figures.get("counted", "processed")) if first else "processed",
        "candidates": [
            *(_row(Candidate(g.key, None, "refused", f"of the recipe itself: {g.reason}")) for g in gone),
            *map(_row, search.candidates),
        ],
        "events": [asdict(event) for event in search.events],
        "winner": _winner(request, search),
    }


def _load(search: Search) -> float | None:
    results = [result for candidate in search.candidates for result in candidate.results.values()]
    loads = [load for result in results if (load := result.figures.get("load")) is not None]
    return statistics.median(loads) if loads else None


def _row(candidate: Candidate) -> CandidateRow:
    result = candidate.best if candidate.timed else None
    proof, recipe, predicted = candidate.results.get("prove"), candidate.recipe, candidate.prediction
    return {
        "key": candidate.key,
        "over": candidate.over,
        "state": candidate.state,
        "reason": candidate.reason,
        "round": candidate.round,
        "at_s": candidate.at_s,
        "recipe": write_toml(recipe) if recipe else "",
        "techniques": [name for name, _ in recipe.technique_uses()] if recipe else [],
        "kind": candidate.kind,
        "settings": [named(name, knobs) for name, knobs in recipe.technique_uses()] if recipe else [],
        "micro": recipe.micro if recipe else None,
        "predicted": {
            "tokens_per_s": predicted.tokens_per_s,
            "memory_bytes": predicted.memory_bytes,
            "limit_bytes": predicted.limit_bytes,
        }
        if predicted
        else None,
        "expected": candidate.expected,
        "ratio": candidate.ratio,
        "tokens_per_s": measured(median_interval([result.rates]), [list(result.rates)]) if result else None,
        "processed_per_s": result.figures.get("processed") if result else None,
        "peak_memory_bytes": result.peak_memory_bytes if result else None,
        "evidence": [dict(row) for row in proof.evidence] if proof else [],
        "parity": dict(proof.parity) if proof and proof.parity else None,
        "life": candidate.life,
    }


def _winner(request: Request, search: Search) -> dict[str, Any] | None:
    won = search.winner
    if won is None or won.recipe is None:
        return None
    ratio, speed = search.gain, won.best.speed
    parity = won.results["prove"].parity if "prove" in won.results else None
    found: dict[str, Any] = {
        "key": won.key,
        "what": describe(won.recipe),
        "tokens_per_s": speed,
        "peak_memory_bytes": won.best.peak_memory_bytes,
        "gain": {"ratio": ratio.ratio, "ci95": [ratio.low, ratio.high], "paired": ratio.paired}
        if ratio
        else None,
        "memory_ratio": won.best.peak_memory_bytes / max(1, search.base.best.peak_memory_bytes),
        "parity": dict(parity) if parity else None,
        "life": won.life,
        "as_it_stood": won is search.base,
    }
    if request.goal.objective == "longest-sequence":
        found["sequence"] = won.recipe.batch.sequence
    if request.price is not None:
        found["cost_per_million_tokens"] = request.price / 3600 / speed * 1e6
    return found


def recipe_file(request: Request, search: Search, record: TuneRecord) -> str:
    """The winner as a recipe file, with a comment on its origin."""
    assert search.winner is not None
    assert search.winner.recipe is not None
    machine, winner = search.rules.machine, record["winner"]
    assert winner is not None
    parity = winner["parity"]
    if winner["as_it_stood"]:
        gained = "nothing was proved better than the recipe it came from"
    elif winner["gain"]:
        gained = f"{over_original(winner['gain'])}, and {winner['memory_ratio']:.2f}× its memory"
    else:
        gained = f"sequences of {search.winner.recipe.batch.sequence:,} tokens, from the recipe it came from"
    proved = f"parity with plain fp32: {parity['verdict']}" if parity else "parity was not traced"
    lived = (winner["life"] or {}).get("verdict", "not lived")
    return (
        f"# Made by `rush tune {request.name}`: {gained}; {proved}; a short life: {lived}. The evidence is in "
        "tune.json.\n"
        f"{mark(record['fingerprint'], machine.summary())}\n"
        f"{write_toml(search.winner.recipe)}"
    )
