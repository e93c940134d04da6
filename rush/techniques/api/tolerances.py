"""Parity: a run compared with plain fp32, by its losses, its gradient norms and the gradient of every tensor.

Two runs from the same weights on the same batches give losses and gradient norms step by step, and the gradient of
each tensor at step one. What is promised depends on the technique's declared class: EXACT means bit for bit; CLOSE allows what
rounding in the dtype of the matmuls explains; STATISTICAL compares the loss curves, because rounded weights drift apart. Its
gradients at step one must be explained by rounding all the same: nothing has drifted by then. What is *measured* is the finest
of these tests that a run passes, whatever it promised.

How far losses and gradient norms may be off is in `rush/records/loss_curves.py`; a page that is drawn from a record applies it
too.

The tolerances are calibrated: a few times the worst of correct techniques over seeds and two model families (the
figures are next to them), and below what the smallest planted bug showed, one tensor's gradient off by 1 %. In bf16
rounding alone puts a gradient off by more than that, so such a bug must be found in fp32: a technique is judged in
fp32 wherever it can run there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from rush.records.loss_curves import (
    CLOSE_STEPS,
    MEASURED,
    ParityVerdict,
    PerturbedRun,
    Tolerance,
    close_tolerance,
    compare_curves,
    growth,
    step_differences,
)
from rush.records.step_gap import more_steps_words
from rush.techniques.api.contract import Parity

GRADIENT_PER_ROUNDING = 25.6
"""Allowed error of a gradient over the relative error of a matmul: the 0.1 of bf16 over its 2⁻⁸."""
GRADIENT_MOST = 0.8
"""However coarse the rounding: a gradient of zeros is off by 1, one of another batch by 1.4. Over 21 records of an H200, the worst
tensor of correct bf16 recipes was off by 0.007 to 0.051, of fp8 recipes by 0.03 to 0.54."""


def gradient_tolerance(dtype: str, relative_error: float = 0.0) -> float:
    """What rounding explains of a gradient. `relative_error`: of the matmuls, as techniques declare it; in plain fp32 matmuls
    nothing is rounded further, whatever they declare."""
    own = close_tolerance(dtype).gradient
    if dtype == "float32":
        return own
    return max(own, min(GRADIENT_MOST, GRADIENT_PER_ROUNDING * relative_error))


def gradient_errors(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """For each tensor, the norm of the difference over the norm of the reference, which is at least a thousandth of the
    RMS over all tensors."""
    assert ours.keys() == reference.keys(), ours.keys() ^ reference.keys()
    norms = {name: _norm(gradient) for name, gradient in reference.items()}
    floor = 1e-3 * math.sqrt(sum(norm**2 for norm in norms.values()) / max(1, len(norms)))
    return {
        name: _norm(_wide(ours[name]) - _wide(gradient)) / max(norms[name], floor)
        for name, gradient in reference.items()
    }


def _wide(gradient: Tensor) -> Tensor:
    """At least float32; float64 would dominate the time of a comparison."""
    return gradient.cpu().to(torch.promote_types(gradient.dtype, torch.float32))


def _norm(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float64))


def judge(
    parity: Parity,
    dtype: str,
    losses: Sequence[float],
    reference_losses: Sequence[float],
    grad_norms: Sequence[float],
    reference_grad_norms: Sequence[float],
    gradient_errors: Mapping[str, float],
    perturbed: PerturbedRun | None = None,
    relative_error: float = 0.0,
) -> ParityVerdict:
    """Compare a run with the plain one. `dtype` is that of the matmuls: float32, tf32, bfloat16 or float16; `relative_error` what
    techniques declare where they round further."""
    assert len(losses) == len(reference_losses) == len(grad_norms) == len(reference_grad_norms) > 0
    if parity is Parity.CHANGES:
        return ParityVerdict("not judged", None, None, "the result differs by design")
    if not all(map(math.isfinite, [*losses, *grad_norms])):
        return ParityVerdict("different", None, None, "a loss or gradient norm is non-finite")
    runs = losses, reference_losses, grad_norms, reference_grad_norms, gradient_errors, perturbed
    exact = _judge_steps("exact", dtype, *runs)
    close = _judge_steps("close", dtype, *runs)
    curve = compare_curves(losses, reference_losses, perturbed and perturbed.losses)
    beyond = _beyond(gradient_errors, gradient_tolerance(dtype, relative_error))
    passed = (exact.verdict == "equal", close.verdict == "equal", curve.verdict == "equal" and beyond is None)
    measured = next((name for name, held in zip(MEASURED, passed, strict=True) if held), None)
    promised = {Parity.EXACT: exact, Parity.CLOSE: close, Parity.STATISTICAL: curve}[parity]
    if parity is Parity.STATISTICAL:
        if close.verdict == "equal" != curve.verdict:
            promised = close  # the finer test
        elif beyond is not None and curve.verdict == "equal":
            promised = beyond
    if parity is Parity.STATISTICAL and promised is close:
        promised = promised._replace(why=f"{promised.why}; {more_steps_words(curve.more_steps)}")
    return promised._replace(measured=measured, gap=curve.gap, more_steps=curve.more_steps)


def _beyond(errors: Mapping[str, float], tolerance: float) -> ParityVerdict | None:
    """The verdict on a gradient that rounding does not explain, if there is one."""
    worst = max(errors, key=lambda name: errors[name], default=None)
    if worst is None or errors[worst] <= tolerance:
        return None
    why = f"the gradient of {worst} is off by {errors[worst]:.1e}, beyond the {tolerance:.1e} that rounding explains"
    return ParityVerdict("different", errors[worst], tolerance, why)


def _judge_steps(
    test: str,
    dtype: str,
    losses: Sequence[float],
    reference_losses: Sequence[float],
    grad_norms: Sequence[float],
    reference_grad_norms: Sequence[float],
    gradient_errors: Mapping[str, float],
    perturbed: PerturbedRun | None,
) -> ParityVerdict:
    """Compare step by step: not a bit may differ, or what rounding explains."""
    exact = test == "exact"
    first = len(losses) if exact else CLOSE_STEPS
    allowed = Tolerance(0.0, 0.0, 0.0) if exact else close_tolerance(dtype)
    grown = 0.0 if exact else growth(dtype)
    found = [
        *step_differences(
            "loss",
            allowed.loss,
            grown,
            losses[:first],
            reference_losses[:first],
            perturbed and perturbed.losses,
        ),
        *step_differences(
            "gradient norm",
            allowed.grad_norm,
            grown,
            grad_norms[:first],
            reference_grad_norms[:first],
            perturbed and perturbed.grad_norms,
        ),
        *((error, allowed.gradient, f"the gradient of {name}") for name, error in gradient_errors.items()),
    ]
    worst, tolerance, what = max(found, key=lambda item: item[0] / item[1] if item[1] else item[0])
    equal = worst <= tolerance
    if exact and equal:
        return ParityVerdict("equal", worst, tolerance, f"bit for bit equal over {len(losses)} steps")
    relation = "within" if equal else "beyond"
    kind = "bit-for-bit equality" if exact else f"rounding in {dtype}"
    why = f"{what} is off by {worst:.1e}, {relation} the {tolerance:.1e} of {kind}"
    if equal and len(losses) > first:
        curve = compare_curves(losses, reference_losses, perturbed and perturbed.losses)
        if curve.verdict != "equal":
            return curve
        why += f" in the first {first} steps; over all {curve.why}"
    return ParityVerdict("equal" if equal else "different", worst, tolerance, why)


@torch.no_grad()
def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of every gradient by name."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
