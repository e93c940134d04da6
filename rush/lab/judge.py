"""The parity verdict of a rung, from its trace and the plain fp32 one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rush.lab.bench import Bench
from rush.lab.parity import gradient_errors
from rush.lab.trial import Outcome
from rush.recipe import Recipe
from rush.techniques import Parity

LOOSER = [Parity.EXACT, Parity.CLOSE, Parity.STATISTICAL, Parity.CHANGES]
TOLERANCE = {
    ("EXACT", "float32"): 1e-5,
    ("CLOSE", "float32"): 1e-3,
}


def loosest(promises: Iterable[str]) -> Parity:
    """What a recipe promises: no more than the loosest of its techniques does."""
    return max((Parity[name] for name in promises), key=LOOSER.index, default=Parity.EXACT)


def parity_of(bench: Bench, recipe: Recipe, reference: Recipe, outcome: Outcome) -> dict[str, Any]:
    """The record's parity part for one rung."""
    promise = loosest(row["parity"] for row in outcome.found.get("techniques", {}).values())
    wanted = bench.parity_recipe(recipe)
    plain, tried = bench.trace(reference), bench.trace(wanted)
    if tried is None:
        diverged = outcome.found.get("ended") == "diverged"
        return _unjudged(
            promise, "different" if diverged else "not judged", outcome.reason or "there is no trace"
        )
    if plain is None:
        return _unjudged(
            promise, "not judged", "plain fp32 could not be run here, so there is nothing to compare with"
        )
    errors = gradient_errors(bench.gradients(reference), bench.gradients(wanted))
    worst = max(errors, key=lambda name: errors[name])
    losses = [abs(a - b) / abs(b) for a, b in zip(tried["losses"], plain["losses"], strict=True)]
    dtype = outcome.found["timing"]["dtype"] if "timing" in outcome.found else "float32"
    tolerance = TOLERANCE.get((promise.name, dtype), 5e-2)
    distance = max(max(losses), errors[worst])
    equal = distance <= tolerance
    return {
        "verdict": "not judged" if promise is Parity.CHANGES else "equal" if equal else "different",
        "class": promise.name,
        "tolerance": tolerance,
        "worst": distance,
        "steps": len(tried["losses"]),
        "losses": tried["losses"],
        "reference_losses": plain["losses"],
        "grad_norms": tried["grad_norms"],
        "reference_grad_norms": plain["grad_norms"],
        "worst_tensor": {"name": worst, "relative_error": errors[worst]},
        "why": "temporary",
    }


def _unjudged(promise: Parity, verdict: str, why: str) -> dict[str, Any]:
    return {
        "verdict": verdict,
        "class": promise.name,
        "tolerance": None,
        "worst": None,
        "steps": 0,
        "losses": [],
        "reference_losses": [],
        "grad_norms": [],
        "reference_grad_norms": [],
        "worst_tensor": None,
        "why": why,
    }
