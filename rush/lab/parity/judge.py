"""The parity verdict of a rung: its trace against that of plain fp32, within the tolerance of its techniques' classes.

A recipe promises no more than the loosest of its techniques. Without a trace there is no verdict of equal; a parity run that
diverged is different.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from rush.lab.parity import differences
from rush.lab.parity.differences import (
    NO_GRADIENT,
    OTHER_GRADIENT,
    Difference,
    Sketches,
    after_timing,
    in_first_steps,
    in_timed_steps,
    in_words,
    main_kind,
)
from rush.lab.parity.trace import INITIAL, MOVED, without_speed
from rush.lab.trial.found import AuditFound, TraceFound
from rush.lab.trial.runner import Bench
from rush.lab.trial.trial import Outcome
from rush.recipe import Recipe
from rush.recipe_io import CONSTANT_BATCH, changed
from rush.records.loss_curves import PerturbedRun
from rush.techniques import Parity
from rush.techniques.api.tolerances import gradient_errors, gradient_tolerance, judge

LOOSER = [Parity.EXACT, Parity.CLOSE, Parity.STATISTICAL, Parity.CHANGES]


def loosest(promises: Iterable[str]) -> Parity:
    """The parity class of a recipe: the loosest of its techniques'."""
    return max((Parity[name] for name in promises), key=LOOSER.index, default=Parity.EXACT)


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
    found = parity_of(bench, recipe, reference, outcome, timed_reference(bench, recipe, outcome, base))
    found["against"] = f"plain fp32 with {names}" if names else "plain fp32"
    if kept != without_speed(base).techniques:
        found["why"] = f"what is learned differs by design; compared with {found['against']}: {found['why']}"
        found["verdict"] = "not judged" if found["verdict"] == "equal" else found["verdict"]
    return found, bench.known(plain, "reference")


def timed_reference(
    bench: Bench, recipe: Recipe, outcome: Outcome, base: Recipe, limit_s: float = math.inf
) -> Outcome | None:
    """Plain fp32 and its perturbed run on the batches that a recipe was timed on; None where it is plain itself, where a technique
    decides how rows are packed, or where plain fp32 is too large."""
    timing = outcome.found.get("timing", {})
    if recipe.techniques == without_speed(recipe).techniques or timing.get("packed"):
        return None
    if not timing.get("steps"):
        return None
    return bench.curve(_on_timed_batches(recipe, base), len(timing["steps"]["losses"]), limit_s)


def _on_timed_batches(recipe: Recipe, base: Recipe) -> Recipe:
    """Plain fp32 on the batches that a recipe is timed on, in the base's micro batches where they divide them: those fit."""
    plain = without_speed(recipe)
    if recipe.objective.kind != "lm" or recipe.step_tokens % (base.micro * recipe.batch.sequence):
        return plain
    return changed(
        plain, {"batch.micro": base.micro, "batch.total_tokens": recipe.step_tokens, **CONSTANT_BATCH}
    )


def parity_of(
    bench: Bench, recipe: Recipe, reference: Recipe, outcome: Outcome, timed: Outcome | None = None
) -> dict[str, Any]:
    """The parity record of one rung. Techniques that the reference has too (adapters) do not count; another micro batch changes
    the order of additions, and so the rounding. `timed`: the reference and its perturbed run on the timed batches."""
    own, wanted = {name for name, _ in reference.technique_uses()}, bench.parity_recipe(recipe)
    rows = {name: row for name, row in outcome.found["techniques"].items() if name not in own}
    others = [Parity.CLOSE.name] if wanted.micro != reference.micro else []
    promise = loosest([*(row["parity"] for row in rows.values()), *others])
    rounding = max((row.get("relative_error", 0.0) for row in rows.values()), default=0.0)
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
    dtype = outcome.found["timing"]["dtype"]
    judged = judge(
        promise,
        dtype,
        tried["losses"],
        plain["losses"],
        tried["grad_norms"],
        plain["grad_norms"],
        errors,
        PerturbedRun(perturbed["losses"], perturbed["grad_norms"]) if perturbed else None,
        rounding,
    )
    worst = max(errors, key=lambda name: errors[name])
    finite = math.isfinite(errors[worst])
    record = {
        "verdict": judged.verdict,
        "class": promise.name,
        "measured": judged.measured,
        "gap": judged.gap,
        "more_steps": judged.more_steps,
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
    if promise is Parity.CHANGES:
        return record
    ours, theirs = (Sketches.read(bench.gradients(one)) for one in (wanted, reference))
    same_rows = recipe.objective.kind == "lm" or not outcome.found["timing"].get("packed", True)
    early = [
        *in_first_steps(tried, plain, ours, theirs, dtype, rounding, same_rows=same_rows),
        *_in_gradients(errors, gradient_tolerance(dtype, rounding)),
        *_in_fp32(bench, wanted, reference, tried),
    ]
    curves = (timed.found.get("curve"), timed.found.get("curve_twin")) if timed else (None, None)
    in_time, compared = in_timed_steps(outcome.found["timing"], *curves, same_rows=same_rows)
    audit = outcome.found.get(
        "audit", AuditFound(steps=0, why="an older trial: nothing was compared after its timing")
    )
    late = after_timing(audit, dtype, rounding, tried.get("weights"))
    known = {each.kind for each in early}
    found = [*early, *(replace(each, late=each.kind not in known) for each in (*in_time, *late))]
    return _named(record | {"timed": compared, "after_timing": _told(audit)}, found)


def in_further_process(parity: dict[str, Any], outcome: Outcome, first: Outcome) -> dict[str, Any]:
    """The parity record once a further process of the rung was timed: it must have trained as the first did."""
    timing = outcome.found.get("timing")
    if timing is None or "differences" not in parity or parity["differences"]:
        return parity
    found = differences.in_further_process(timing, first.found.get("timing", {}))
    return _named(parity, [replace(each, late=True) for each in found])


def _named(record: dict[str, Any], found: list[Difference]) -> dict[str, Any]:
    """The record with its differences by name; with one, no run is equal."""
    record["differences"] = [each.to_dict() for each in found]
    if not found:
        return record
    return record | {
        "verdict": "different",
        "kind": main_kind(found),
        "measured": None,
        "why": f"{in_words(found)}; {record['why']}",
    }


def _told(audit: AuditFound) -> dict[str, Any]:
    """What the record keeps of the steps after the timing."""
    keys = ("steps", "losses", "plain_losses", "grad_norms", "plain_grad_norms", "updates", "why")
    told = {key: audit[key] for key in keys if key in audit}  # type: ignore[literal-required]
    errors = {name: math.inf if error is None else error for name, error in audit.get("errors", {}).items()}
    if errors:
        worst = max(errors, key=lambda name: errors[name])
        told["worst_tensor"] = {
            "name": worst,
            "relative_error": errors[worst] if math.isfinite(errors[worst]) else None,
        }
    return told


def _in_gradients(
    errors: Mapping[str, float], allowed: float, where: str = "at step one"
) -> list[Difference]:
    """Tensors whose gradient is missing, and the one that is farthest off."""
    found = []
    if missing := sorted(name for name, error in errors.items() if math.isinf(error)):
        found.append(Difference(NO_GRADIENT, f"{', '.join(missing[:3])} {where}, {len(missing)} in all"))
    off = {name: error for name, error in errors.items() if math.isfinite(error) and error > allowed}
    if off:
        worst = max(off, key=lambda name: off[name])
        said = f"that of {worst} is off by {off[worst]:.1e} {where}, {allowed:.1e} allowed"
        found.append(Difference(OTHER_GRADIENT, said))
    return found


def _in_fp32(bench: Bench, wanted: Recipe, reference: Recipe, tried: TraceFound) -> list[Difference]:
    """Step one again, without the techniques that round: what 16 bits hide shows there."""
    exact = tried.get("in_fp32")
    if exact is None or not bench.gradients_fp32(wanted).exists():
        return []
    errors = stored_errors(bench.gradients_fp32(wanted), bench.gradients(reference))
    return _in_gradients(
        errors, gradient_tolerance("float32"), f"in fp32 (with {', '.join(exact['techniques'])})"
    )


def stored_errors(ours: Path, reference: Path) -> dict[str, float]:
    """The relative error of every tensor's gradient; infinite where one is missing or has another shape."""
    tried, plain = _gradients(ours), _gradients(reference)
    both = [name for name in plain if name in tried and tried[name].shape == plain[name].shape]
    errors = gradient_errors({name: tried[name] for name in both}, {name: plain[name] for name in both})
    return {name: errors.get(name, math.inf) for name in plain}


def _gradients(file: Path) -> dict[str, Tensor]:
    """Without the sketches of weights that lie beside them."""
    return {n: tensor for n, tensor in load_file(file).items() if not n.startswith((INITIAL, MOVED))}


def _unjudged(promise: Parity, verdict: str, why: str) -> dict[str, Any]:
    nothing: dict[str, Any] = dict.fromkeys(("tolerance", "worst", "worst_tensor"))
    empty: dict[str, Any] = {
        key: [] for key in ("losses", "reference_losses", "grad_norms", "reference_grad_norms", "twin_losses")
    }
    return {"verdict": verdict, "class": promise.name, "steps": 0, **nothing, **empty, "why": why}
