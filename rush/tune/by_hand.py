"""Hand-written recipes compared with the winner of a search: timed as long, in the same folder, on the same data.

Only the techniques and the micro batch of such a recipe are used; model, data and tokens per step are those of the search. It
is timed after the search, so it takes none of its time and has no influence on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rush.errors import RecipeError, RushError
from rush.recipe import Recipe
from rush.recipe_io import changed
from rush.tune.goal import TrialLimit, gain
from rush.tune.search import Doing, Search
from rush.tune.trials import Trials

LIMIT_S = 600.0


def fit_beside(name: str, other: Recipe, recipe: Recipe) -> Recipe:
    """The search's recipe with the other one's techniques and micro batch; RecipeError if it is for another model."""
    for what, theirs, ours in (
        ("the model", other.model.name, recipe.model.name),
        ("batch.sequence", other.batch.sequence, recipe.batch.sequence),
        ("objective.kind", other.objective.kind, recipe.objective.kind),
    ):
        if theirs != ours:
            raise RecipeError(
                f"--beside {name}: {what} is {theirs}, and of the recipe that is tuned {ours}; name a recipe for the same run."
            )
    return changed(recipe, {"techniques": list(other.techniques), "batch.micro": other.micro})


def beside(search: Search, lab: Trials, others: Mapping[str, Recipe]) -> list[dict[str, Any]]:
    """The speed of each, and the winner's gain over it."""
    found = []
    for name, recipe in others.items():
        search.report(search, Doing(name, "beside"))
        unknown = dict.fromkeys(("reason", "tokens_per_s", "peak_memory_bytes", "gain"))
        row: dict[str, Any] = {"name": name, "status": "ok", **unknown}
        try:
            result = lab.trial("beside", recipe, TrialLimit(LIMIT_S, patient=True))
        except RushError as error:  # its micro batch does not divide the tokens of a trial
            found.append(row | {"status": "unsupported", "reason": str(error)})
            continue
        if not result.ok:
            found.append(row | {"status": result.status, "reason": result.reason})
            continue
        row["tokens_per_s"], row["peak_memory_bytes"] = result.speed, result.peak_memory_bytes
        if search.winner is not None and search.winner.timed:
            ratio = gain(result, search.winner.best)
            row["gain"] = {"ratio": ratio.ratio, "ci95": [ratio.low, ratio.high], "paired": ratio.paired}
        found.append(row)
    return found
