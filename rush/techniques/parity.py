"""Does it still learn the same? Runs held against plain fp32, with tolerances in one place.

Two runs from the same weights on the same batches give losses and gradient norms step by step, and the
gradient of each tensor at step one. How far they may be apart is the technique's declared class and the
dtype the matmuls ran in: EXACT means the same bits; CLOSE allows what rounding explains; STATISTICAL
compares learning curves, because weights that are themselves rounded drift apart.

The tolerances are calibrated: a few times the worst that correct techniques showed over seeds and two
families (the figures stand beside them), and below what the smallest planted bug showed, one tensor's
gradient off by 1 %. In bf16 rounding alone puts a gradient off by more than that, so such a bug must be
looked for in fp32: a technique is judged in fp32 wherever it can run there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rush.techniques.contract import Parity


@dataclass(frozen=True)
class Tolerance:
    """The largest relative differences that rounding explains."""

    loss: float
    """Of the loss at any step."""
    grad_norm: float
    """Of the gradient norm at any step."""
    gradient: float
    """Of one tensor's gradient at step one: the size of the difference over the size of the reference."""


# Measured with correct techniques on models of two layers over 6 to 8 steps: the worst loss / norm / gradient was
# float32 1e-7 / 1e-7 / 4e-7, float16 9e-6 / 1e-4 / 1e-3, bfloat16 3e-4 / 5e-3 / 1e-2. The gradient's error is two or
# three roundings of its dtype (a mantissa of 24, 11, 11 and 8 bits) there, and grows with depth and with the length of
# the sums; the room left is for models of tens of layers.
CLOSE: Mapping[str, Tolerance] = {
    "float32": Tolerance(loss=1e-4, grad_norm=1e-3, gradient=1e-3),
    "tf32": Tolerance(loss=2e-3, grad_norm=1e-2, gradient=2e-2),
    "float16": Tolerance(loss=2e-3, grad_norm=1e-2, gradient=2e-2),
    "bfloat16": Tolerance(loss=1e-2, grad_norm=5e-2, gradient=1e-1),
}
STATISTICAL_LOSS = 0.03
"""Of the mean loss over the second half of the steps, where weights or moments themselves are rounded."""


class Judgement(NamedTuple):
    verdict: str
    """equal, different, or not judged."""
    worst: float | None
    """The difference nearest to (or farthest beyond) its tolerance."""
    tolerance: float | None
    why: str


def gradient_errors(ours: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> dict[str, float]:
    """For each tensor, the size of the difference over the size of the reference.

    A tensor whose gradient is almost nothing is measured against a thousandth of a fair share of the whole.
    """
    assert ours.keys() == reference.keys(), ours.keys() ^ reference.keys()
    norms = {name: float(gradient.double().norm()) for name, gradient in reference.items()}
    floor = 1e-3 * math.sqrt(sum(norm**2 for norm in norms.values()) / len(norms))
    return {
        name: float((ours[name].double().cpu() - gradient.double().cpu()).norm()) / max(norms[name], floor)
        for name, gradient in reference.items()
    }


def judge(
    parity: Parity,
    dtype: str,
    losses: Sequence[float],
    reference_losses: Sequence[float],
    grad_norms: Sequence[float],
    reference_grad_norms: Sequence[float],
    gradient_errors: Mapping[str, float],
) -> Judgement:
    """Hold a run against the plain one. `dtype` is that of the matmuls: float32, tf32, bfloat16 or float16."""
    assert len(losses) == len(reference_losses) == len(grad_norms) == len(reference_grad_norms) > 0
    if parity is Parity.CHANGES:
        return Judgement("not judged", None, None, "what is learned differs by design")
    if not all(map(math.isfinite, [*losses, *grad_norms])):
        return Judgement("different", None, None, "a loss or gradient norm is not finite")
    if parity is Parity.STATISTICAL:
        return _judge_curve(losses, reference_losses)
    exact = parity is Parity.EXACT
    allowed = Tolerance(0.0, 0.0, 0.0) if exact else CLOSE[dtype]
    found = [
        *(
            (_relative(ours, reference), allowed.loss, f"the loss of step {step}")
            for step, (ours, reference) in enumerate(zip(losses, reference_losses, strict=True), 1)
        ),
        *(
            (_relative(ours, reference), allowed.grad_norm, f"the gradient norm of step {step}")
            for step, (ours, reference) in enumerate(zip(grad_norms, reference_grad_norms, strict=True), 1)
        ),
        *((error, allowed.gradient, f"the gradient of {name}") for name, error in gradient_errors.items()),
    ]
    worst, tolerance, what = max(found, key=lambda item: item[0] / item[1] if item[1] else item[0])
    equal = worst <= tolerance
    if exact and equal:
        return Judgement("equal", worst, tolerance, f"the same bits over {len(losses)} steps")
    relation = "within" if equal else "beyond"
    kind = "the same bits" if exact else f"rounding in {dtype}"
    return Judgement(
        "equal" if equal else "different",
        worst,
        tolerance,
        f"{what} is off by {worst:.1e}, {relation} the {tolerance:.0e} of {kind}",
    )


def _judge_curve(losses: Sequence[float], reference_losses: Sequence[float]) -> Judgement:
    half = len(losses) // 2
    ours, reference = (sum(curve[half:]) / len(curve[half:]) for curve in (losses, reference_losses))
    worst = _relative(ours, reference)
    equal = worst <= STATISTICAL_LOSS
    return Judgement(
        "equal" if equal else "different",
        worst,
        STATISTICAL_LOSS,
        f"the mean loss of the second half is {ours:.4f} against {reference:.4f}: off by {worst:.1e}, "
        f"{'within' if equal else 'beyond'} the {STATISTICAL_LOSS:.0e} of one learning curve",
    )


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference)


@torch.no_grad()
def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of every gradient by name, as they are now."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
