"""The parity verdict of a rung: its trace against that of plain fp32, within the tolerance of its techniques' classes.

A recipe promises no more than the loosest of its techniques. Without a trace there is no verdict of equal; a parity run that
diverged is different.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from rush.lab.trial.runner import Bench
from rush.lab.trial.trial import Outcome
from rush.recipe import Recipe
from rush.techniques import Parity, registry
from rush.techniques.api.tolerances import PerturbedRun, gradient_errors, judge

LOOSER = [Parity.EXACT, Parity.CLOSE, Parity.STATISTICAL, Parity.CHANGES]


def loosest(promises: Iterable[str]) -> Parity:
    """The parity class of a recipe: the loosest of its techniques'."""
    return max((Parity[name] for name in promises), key=LOOSER.index, default=Parity.EXACT)


def without_speed(recipe: Recipe) -> Recipe:
    """The recipe with only the techniques that decide what is learned: none, or adapters and their base."""
    known = registry()
    kept = [
        entry
        for entry, (name, _) in zip(recipe.techniques, recipe.technique_uses(), strict=True)
        if name in known and known[name].parity is Parity.CHANGES
    ]
    return recipe.model_copy(update={"techniques": kept})


def parity_with_plain(
    bench: Bench, recipe: Recipe, outcome: Outcome, base: Recipe
) -> tuple[dict[str, Any], Outcome | None]:
    """The parity record of a rung, and the trial of its reference, if one was run for it alone.

    The reference is `base` in plain fp32, with the rung's techniques that decide what is learned. Where the base has others,
    the rung learns something else by design, and is never called equal.
    """
    kept = without_speed(recipe).techniques
    plain = base.model_copy(update={"techniques": kept})
    reference = bench.parity_recipe(plain)
    if bench.trace(reference) is None:
        bench.run(plain, "reference", first=True, timed=False)
    names = ", ".join(name for name, _ in plain.technique_uses())
    found = parity_of(bench, recipe, reference, outcome)
    found["against"] = f"plain fp32 with {names}" if names else "plain fp32"
    if kept != without_speed(base).techniques:
        found["why"] = f"what is learned differs by design; compared with {found['against']}: {found['why']}"
        found["verdict"] = "not judged" if found["verdict"] == "equal" else found["verdict"]
    return found, bench.known(plain, "reference")


def parity_of(bench: Bench, recipe: Recipe, reference: Recipe, outcome: Outcome) -> dict[str, Any]:
    """The parity record of one rung. Techniques that the reference has too (adapters) do not count; another micro batch changes
    the order of additions, and so the rounding."""
    own, wanted = {name for name, _ in reference.technique_uses()}, bench.parity_recipe(recipe)
    promises = [row["parity"] for name, row in outcome.found["techniques"].items() if name not in own]
    promise = loosest([*promises, *([Parity.CLOSE.name] if wanted.micro != reference.micro else [])])
    plain, tried = bench.trace(reference), bench.trace(wanted)
    perturbed = bench.trace(reference, rounded=True)
    if tried is None:
        diverged = outcome.found.get("ended") == "diverged"
        why = outcome.reason or "its gradients at step one are missing"
        return _unjudged(promise, "different" if diverged else "not judged", why)
    if plain is None:
        why = "plain fp32 could not be traced here, so there is nothing to compare with"
        return _unjudged(promise, "not judged", why)
    errors = stored_errors(bench.gradients(wanted), bench.gradients(reference))
    judged = judge(
        promise,
        outcome.found["timing"]["dtype"],
        tried["losses"],
        plain["losses"],
        tried["grad_norms"],
        plain["grad_norms"],
        errors,
        PerturbedRun(perturbed["losses"], perturbed["grad_norms"]) if perturbed else None,
    )
    worst = max(errors, key=lambda name: errors[name])
    finite = math.isfinite(errors[worst])
    return {
        "verdict": judged.verdict,
        "class": promise.name,
        "tolerance": judged.tolerance,
        "worst": judged.worst if judged.worst is None or math.isfinite(judged.worst) else None,
        "steps": len(tried["losses"]),
        "losses": tried["losses"],
        "reference_losses": plain["losses"],
        "grad_norms": tried["grad_norms"],
        "reference_grad_norms": plain["grad_norms"],
        "twin_losses": perturbed["losses"] if perturbed else [],
        "worst_tensor": {"name": worst, "relative_error": errors[worst] if finite else None},
        "why": judged.why + (f"; {tried['skipped']} updates were skipped" if tried["skipped"] else ""),
    }


def stored_errors(ours: Path, reference: Path) -> dict[str, float]:
    """The relative error of every tensor's gradient; infinite where one is missing or has another shape."""
    tried, plain = load_file(ours), load_file(reference)
    both = [name for name in plain if name in tried and tried[name].shape == plain[name].shape]
    errors = gradient_errors({name: tried[name] for name in both}, {name: plain[name] for name in both})
    return {name: errors.get(name, math.inf) for name in plain}


def _unjudged(promise: Parity, verdict: str, why: str) -> dict[str, Any]:
    nothing: dict[str, Any] = dict.fromkeys(("tolerance", "worst", "worst_tensor"))
    empty: dict[str, Any] = {
        key: [] for key in ("losses", "reference_losses", "grad_norms", "reference_grad_norms", "twin_losses")
    }
    return {"verdict": verdict, "class": promise.name, "steps": 0, **nothing, **empty, "why": why}
