"""How a run differs from plain training, by name.

Parity compares numbers; this names the cause, whatever class the author declared. Three sources are checked: the first steps
(the parity trace), the timed steps (their log), and the steps after the timing (the audit). A difference found only in the last
two is *late*: the technique behaved during the parity trace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from rush.lab.parity.trace import INITIAL, MOVED
from rush.lab.trial.found import AuditFound, FlowFound, StepsFound, TimingFound, TraceFound
from rush.records.loss_curves import close_tolerance, compare_curves
from rush.techniques.api.tolerances import gradient_errors, gradient_tolerance

FEWER_ROWS = "trained on fewer rows"
FEWER_LABELS = "trained on fewer labels"
REPEATED = "repeated batches"
OTHER_ORDER = "other data order"
CACHED = "cached results"
OTHER_START = "other initial weights"
OTHER_RATE = "other learning rate"
OTHER_UPDATE = "another update"
UNMOVED = "tensors that never moved"
NO_GRADIENT = "tensors without a gradient"
OTHER_GRADIENT = "another gradient"
OTHER_LOSS = "another loss"
OTHER_CURVE = "another loss curve"

ORDER = (
    FEWER_ROWS, FEWER_LABELS, CACHED, REPEATED, OTHER_ORDER, OTHER_START, UNMOVED, NO_GRADIENT, OTHER_GRADIENT,
    OTHER_RATE, OTHER_UPDATE, OTHER_LOSS, OTHER_CURVE,
)  # fmt: skip
"""The most specific first: fewer rows also change the gradient."""
EFFECTS = (OTHER_GRADIENT, OTHER_RATE, OTHER_UPDATE, OTHER_LOSS, OTHER_CURVE)
"""What follows from other causes; alone, the first of them is the name."""
MOVEMENT, MOVEMENT_16, MOVEMENT_8 = 0.02, 0.2, 0.5
"""Allowed difference of the movement of all weights in the first steps, along that of plain fp32, in fp32, in 16 bits and in fp8:
Adam's first steps follow the sign of a gradient, and rounding turns the smallest. (The audit checks the update itself, to 0.2 %.)"""
UPDATE = 2e-3
"""Allowed relative difference of an fp32 update from AdamW's formula."""


@dataclass(frozen=True)
class Difference:
    kind: str
    detail: str
    late: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "detail": self.detail, "late": self.late}

    def __str__(self) -> str:
        return f"{'late: ' if self.late else ''}{self.kind}: {self.detail}"


@dataclass(frozen=True)
class Sketches:
    """Initial weights and their movement, by tensor."""

    initial: dict[str, Tensor]
    moved: dict[str, Tensor]

    @staticmethod
    def read(file: Path) -> Sketches:
        stored = load_file(file)
        starts = {name.removeprefix(INITIAL): t for name, t in stored.items() if name.startswith(INITIAL)}
        moved = {name.removeprefix(MOVED): t for name, t in stored.items() if name.startswith(MOVED)}
        return Sketches(starts, moved)


def in_first_steps(
    tried: TraceFound,
    plain: TraceFound,
    ours: Sketches,
    reference: Sketches,
    dtype: str,
    relative_error: float,
    *,
    same_rows: bool,
) -> list[Difference]:
    """In the parity trace. `relative_error`: of the matmuls, as techniques declare it; `same_rows`: whether batches must be those of the reference, row by row."""
    found = []
    if (steps := tried.get("steps")) and (own := plain.get("steps")):
        found += [*_flow(steps), *_reached(tried.get("flow", {}))]
        if same_rows:
            found += _batches(steps["digests"], own["digests"])
        found += _labels(steps["labels"], own["labels"])
    both = [
        n for n in reference.initial if n in ours.initial and _alike(ours.initial[n], reference.initial[n])
    ]
    errors = gradient_errors({n: ours.initial[n] for n in both}, {n: reference.initial[n] for n in both})
    worst = max(errors, key=lambda name: errors[name], default=None)
    if worst is not None and errors[worst] > (1e-5 if tried.get("weights") == "float32" else 2e-2):
        found.append(Difference(OTHER_START, f"{worst} is off by {errors[worst]:.1e} before the first step"))
    still = sorted(set(tried.get("unmoved", ())) - set(plain.get("unmoved", ())))
    if still and "unmoved" in plain:
        found.append(Difference(UNMOVED, f"{_listed(still)} in {len(tried['losses'])} steps"))
    ratio = _along(ours.moved, reference.moved)
    exact = not tried.get("skipped") and tried.get("weights") == "float32" == plain.get("weights")
    exact = exact and tried.get("moved_steps") == plain.get("moved_steps")
    if ratio is not None and exact and abs(ratio - 1) > _movement(dtype, relative_error):
        said = f"weights moved {ratio:.3f} times as far as in plain fp32 in {tried['moved_steps']} steps"
        found.append(Difference(OTHER_RATE, said))
    return found


def _movement(dtype: str, relative_error: float) -> float:
    if dtype == "float32":
        return MOVEMENT
    return MOVEMENT_16 if relative_error <= 2**-7 else MOVEMENT_8


def _along(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> float | None:
    """How far the weights moved along the way of the reference's, over its length; tensors that never moved have their own name."""
    both = [n for n in reference if n in ours and _alike(ours[n], reference[n]) and bool(ours[n].any())]
    along = sum(float((ours[name] * reference[name]).double().sum()) for name in both)
    length = sum(float(reference[name].double().square().sum()) for name in both)
    return along / length if length else None


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape


def _flow(steps: StepsFound) -> list[Difference]:
    """What reached the innermost pass; 0 where a captured graph was replayed, which calls none."""
    for what, kind in (("rows", FEWER_ROWS), ("tokens", FEWER_ROWS)):
        given, reached = steps[what], steps[f"reached_{what}"]  # type: ignore[literal-required]
        few = [step for step, (a, b) in enumerate(zip(given, reached, strict=True), 1) if 0 < b < a]
        if few:
            said = (
                f"{reached[few[0] - 1]:,} of {given[few[0] - 1]:,} {what} reached the model in step {few[0]}"
            )
            return [Difference(kind, said + (f" and {len(few) - 1} more" if len(few) > 1 else ""))]
    reached = steps["reached_rows"]
    idle = [step for step, count in enumerate(reached, 1) if count == 0]
    if idle and not steps.get("captured") and any(reached):
        said = f"nothing reached the model in step {idle[0]}"
        return [Difference(CACHED, said + (f" and {len(idle) - 1} more" if len(idle) > 1 else ""))]
    return []


def _batches(ours: Sequence[str], reference: Sequence[str]) -> list[Difference]:
    """The loader's batches, by their digests."""
    both = list(zip(ours, reference, strict=False))
    wrong = next((step for step, (a, b) in enumerate(both) if a != b), None)
    if wrong is None:
        return []
    if ours[wrong] in ours[:wrong]:
        return [
            Difference(
                REPEATED, f"step {wrong + 1} has the batch of step {ours.index(ours[wrong]) + 1} again"
            )
        ]
    return [Difference(OTHER_ORDER, f"step {wrong + 1} has another batch than in plain training")]


def _labels(ours: Sequence[int], reference: Sequence[int]) -> list[Difference]:
    for step, (own, plain) in enumerate(zip(ours, reference, strict=False), 1):
        if own != plain:
            return [Difference(FEWER_LABELS, f"{own:,} labels in step {step}, {plain:,} in plain training")]
    return []


def in_timed_steps(
    timing: TimingFound, curve: TraceFound | None, perturbed: TraceFound | None, *, same_rows: bool
) -> tuple[list[Difference], dict[str, Any]]:
    """In the log of a timing, against the reference on the same batches; and what was compared, for the record."""
    steps = timing.get("steps")
    if steps is None:
        return [], {"steps": 0, "compared": 0, "why": "an older trial: its steps were not logged"}
    found, losses = _flow(steps), steps["losses"]
    same = [n for n in range(2, len(losses) + 1) if losses[n - 1] == losses[n - 2] and losses[n - 1] > 1e-3]
    if len(same) > max(1, len(losses) // 10):
        found.append(Difference(CACHED, f"{len(same)} of {len(losses)} losses are those of the step before"))
    compared = 0 if curve is None else min(len(losses), len(curve["losses"]))
    told: dict[str, Any] = {"steps": len(losses), "compared": compared, "losses": losses}
    if curve is None or not compared:
        return found, {**told, "why": "plain fp32 was not run on these batches"}
    told["reference_losses"] = curve["losses"][:compared]
    if not same_rows:
        return found, {
            **told,
            "compared": 0,
            "why": "a technique decides how rows are packed: the batches are its own",
        }
    found += _batches(steps["digests"], curve["steps"]["digests"])
    found += _labels(steps["labels"], curve["steps"]["labels"])
    twin = perturbed["losses"] if perturbed else None
    if twin is not None:
        compared = min(compared, len(twin))
    judged = compare_curves(losses[:compared], curve["losses"][:compared], twin and twin[:compared])
    told |= {
        "compared": compared,
        "verdict": judged.verdict,
        "gap": judged.gap,
        "more_steps": judged.more_steps,
        "why": judged.why,
    }
    if judged.verdict == "different":
        found.append(Difference(OTHER_CURVE, f"over the {compared} timed steps {judged.why}"))
    return found, told


def in_further_process(timing: TimingFound, first: TimingFound) -> list[Difference]:
    """In another process of the same recipe: what reached the model, and the batches and labels of the first process."""
    steps, before = timing.get("steps"), first.get("steps")
    if steps is None or before is None:
        return []
    alike = _batches(steps["digests"], before["digests"])
    return [*_flow(steps), *alike, *_labels(steps["labels"], before["labels"])]


def after_timing(
    audit: AuditFound, dtype: str, relative_error: float, weights: str | None
) -> list[Difference]:
    """In the steps after the timing, each recomputed in plain fp32 from the run's own weights."""
    if not audit.get("steps"):
        return []
    found = _reached(audit["flow"])
    if audit["repeats"]:
        found.append(Difference(CACHED, "a step's gradients are, bit for bit, those of the step before"))
    allowed = gradient_tolerance(dtype, relative_error)
    errors = {name: math.inf if error is None else error for name, error in audit["errors"].items()}
    missing = sorted(name for name, error in errors.items() if math.isinf(error))
    if missing:
        found.append(Difference(NO_GRADIENT, _listed(missing)))
    off = {name: error for name, error in errors.items() if math.isfinite(error) and error > allowed}
    if off:
        worst = max(off, key=lambda name: off[name])
        said = f"that of {worst} is off by {off[worst]:.1e} after the timing, {allowed:.1e} allowed"
        found.append(Difference(OTHER_GRADIENT, said))
    for own, plain in zip(audit["losses"], audit["plain_losses"], strict=True):
        if abs(own - plain) > close_tolerance(dtype).loss * abs(plain):
            said = f"{own:.5g} where plain fp32 has {plain:.5g} from the same weights on the same batch"
            fewer = own < 0.9 * plain and off
            found.append(Difference(FEWER_LABELS if fewer else OTHER_LOSS, said))
            break
    if audit["unmoved"] and weights == "float32":
        found.append(Difference(UNMOVED, f"{_listed(audit['unmoved'])} after the timing"))
    if (updates := audit.get("updates")) is not None:
        worst, ratio = updates["worst"], updates["ratio"]
        if abs(ratio - 1) > UPDATE + worst["rounding"]:
            said = f"updates are {ratio:.3f} times as long as the learning rate makes them"
            found.append(Difference(OTHER_RATE, said))
        elif worst["error"] > UPDATE + 4 * worst["rounding"]:
            said = f"that of {worst['name']} is off by {worst['error']:.1e} from AdamW's"
            found.append(Difference(OTHER_UPDATE, said))
    return found


def _reached(flow: FlowFound) -> list[Difference]:
    """What reached the passes of the audited steps."""
    before: list[str] = []
    given_before: list[str] = []
    for step, given in enumerate(flow.get("digests", ())):
        labels, reached, got = (
            flow["labels"][step],
            flow["reached_labels"][step],
            flow["reached_digests"][step],
        )
        if got and 0 < reached < labels:
            return [Difference(FEWER_LABELS, f"{reached:,} of {labels:,} labels reached the model")]
        # Where a technique splits micro batches, what arrives has no counterpart to compare with.
        if len(got) == len(given) and got != given:
            again = any(one in before for one in got)
            earlier = again or any(one in given_before for one in got)
            said = "a batch of an earlier step" if earlier else "another batch than the loader's"
            return [Difference(REPEATED if again else OTHER_ORDER, f"{said} reached the model")]
        before += got
        given_before += given
    return []


def main_kind(found: Sequence[Difference]) -> str | None:
    """The most specific name."""
    return min((each.kind for each in found), key=ORDER.index, default=None)


def in_words(found: Sequence[Difference]) -> str:
    """The most specific first, one per kind, without differences that only follow from them."""
    first: dict[str, Difference] = {}
    for each in found:
        first.setdefault(each.kind, each)
    causes = [kind for kind in ORDER if kind in first and kind not in EFFECTS]
    told = causes or [kind for kind in ORDER if kind in first][:1]
    return "; ".join(str(first[kind]) for kind in told)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
