"""Parity: runs compared with plain fp32, with all tolerances in one place.

Two runs from the same weights on the same batches give losses and gradient norms step by step, and the gradient of
each tensor at step one. What is promised depends on the technique's declared class: EXACT means bit for bit; CLOSE allows what
rounding in the dtype of the matmuls explains; STATISTICAL compares the loss curves, because rounded weights drift apart. Its
gradients at step one must be explained by rounding all the same: nothing has drifted by then. What is *measured* is the finest
of these tests that a run passes, whatever it promised.

Training amplifies differences, and how fast depends on model, data and learning rate. So there is a perturbed
reference run: plain as well, from weights rounded to bf16 once. Its difference at a step is what one rounding grows
to by then; a technique may differ by its tolerance plus a few times that.

The tolerances are calibrated: a few times the worst of correct techniques over seeds and two model families (the
figures are next to them), and below what the smallest planted bug showed, one tensor's gradient off by 1 %. In bf16
rounding alone puts a gradient off by more than that, so such a bug must be found in fp32: a technique is judged in
fp32 wherever it can run there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rush.techniques.api.contract import Parity


@dataclass(frozen=True)
class Tolerance:
    """The largest relative differences that rounding explains."""

    loss: float
    """Relative difference of the loss at any step."""
    grad_norm: float
    """Relative difference of the gradient norm at any step."""
    gradient: float
    """Relative error of one tensor's gradient at step one."""


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
CLOSE_STEPS = 20
"""Steps that CLOSE compares one by one: later, rounding alone has grown too far. Of a longer run the loss curve counts as well, as
with STATISTICAL."""
STATISTICAL_LEARNED = 0.05
"""Allowed difference of the mean loss, over the second half of the steps and over each quarter, relative to the decrease of the loss.
In the first quarter of 200 steps on an H200 correct recipes were off by 0.0 to 0.5 %; bf16 weights with round-to-nearest, which lose
the small updates of a warm-up, by 20 %, and came within 5 % later."""
STATISTICAL_LOSS = 0.003
"""Allowed difference relative to the loss itself, where it hardly decreased yet: ten times what rounding to bf16 showed."""
STATISTICAL_END = 0.02
"""Allowed difference of the mean loss of the last quarter, relative to the loss: a run that falls behind shows there first, while the
large decrease from random weights, mostly token frequencies, hides it. Over 200 steps on an H200 correct recipes were off by 0.03 to
0.8 %; one with fast accumulation in the gradients of an fp8 LM head by 7.2 %, growing, and was within 5 % of the decrease."""
MAX_ALLOWED = 0.5
"""A run beyond its class's tolerance is not called equal where the perturbed run would allow more than this fraction of the decrease
of the loss. With the `tiny` recipe, whose loss jumps at single steps, 0.63 of 0.79 were allowed, and what was called equal over 20
steps was behind after 200."""
TIMES_PERTURBED = 6.0
"""A technique rounds in every matmul, the perturbed run once. In the gradient norm of step 10 of Llama 3.2 1B on an H200, eleven correct
bf16 rungs were off by 1.0 to 4.2 times as much as the perturbed run."""
# Half a unit in the last place, relative to that of bfloat16.
_ROUNDING = {"float32": 2.0**-16, "tf32": 2.0**-3, "float16": 2.0**-3, "bfloat16": 1.0}


GRADIENT_PER_ROUNDING = 25.6
"""Allowed error of a gradient over the relative error of a matmul: the 0.1 of bf16 over its 2⁻⁸."""
GRADIENT_MOST = 0.8
"""However coarse the rounding: a gradient of zeros is off by 1, one of another batch by 1.4. Over 21 records of an H200, the worst
tensor of correct bf16 recipes was off by 0.007 to 0.051, of fp8 recipes by 0.03 to 0.54."""
MEASURED = ("same bits", "rounding", "statistical")
"""What a run is found to be equal by, the finest first."""


def close_tolerance(dtype: str) -> Tolerance:
    """What rounding in this dtype explains; of dtypes shorter than bf16 (fp8) as much as of bf16."""
    return CLOSE.get(dtype, CLOSE["bfloat16"])


def gradient_tolerance(dtype: str, relative_error: float = 0.0) -> float:
    """What rounding explains of a gradient. `relative_error`: of the matmuls, as techniques declare it; in plain fp32 matmuls
    nothing is rounded further, whatever they declare."""
    own = close_tolerance(dtype).gradient
    if dtype == "float32":
        return own
    return max(own, min(GRADIENT_MOST, GRADIENT_PER_ROUNDING * relative_error))


class PerturbedRun(NamedTuple):
    """The plain run from weights rounded to bf16 once."""

    losses: Sequence[float]
    grad_norms: Sequence[float]


class ParityVerdict(NamedTuple):
    verdict: str
    """equal, different, or not judged."""
    worst: float | None
    """The difference closest to (or farthest beyond) its tolerance."""
    tolerance: float | None
    why: str
    measured: str | None = None
    """One of `MEASURED`, or None."""
    gap: float | None = None
    """Difference of the mean loss over the second half of the steps, relative to the decrease of the loss."""


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
    curve = _judge_curve(losses, reference_losses, perturbed)
    beyond = _beyond(gradient_errors, gradient_tolerance(dtype, relative_error))
    passed = (exact.verdict == "equal", close.verdict == "equal", curve.verdict == "equal" and beyond is None)
    measured = next((name for name, held in zip(MEASURED, passed, strict=True) if held), None)
    promised = {Parity.EXACT: exact, Parity.CLOSE: close, Parity.STATISTICAL: curve}[parity]
    if parity is Parity.STATISTICAL:
        if close.verdict == "equal" != curve.verdict:
            promised = close  # the finer test
        elif beyond is not None and curve.verdict == "equal":
            promised = beyond
    return promised._replace(measured=measured, gap=curve.gap)


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
    grown = 0.0 if exact else TIMES_PERTURBED * _ROUNDING.get(dtype, 1.0)
    found = [
        *_steps(
            "loss",
            allowed.loss,
            grown,
            losses[:first],
            reference_losses[:first],
            perturbed and perturbed.losses,
        ),
        *_steps(
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
        curve = _judge_curve(losses, reference_losses, perturbed)
        if curve.verdict != "equal":
            return curve
        why += f" in the first {first} steps; over all {curve.why}"
    return ParityVerdict("equal" if equal else "different", worst, tolerance, why)


def _steps(
    what: str,
    tolerance: float,
    grown: float,
    ours: Sequence[float],
    reference: Sequence[float],
    perturbed: Sequence[float] | None,
) -> Iterator[tuple[float, float, str]]:
    """For every step: the difference, its tolerance, and its name."""
    for step, (own, plain) in enumerate(zip(ours, reference, strict=True)):
        more = grown * _relative(perturbed[step], plain) if perturbed else 0.0
        yield _relative(own, plain), tolerance + more, f"the {what} of step {step + 1}"


class _Allowance(NamedTuple):
    """Allowed difference of the loss curve."""

    learned: float
    """Decrease of the plain run's loss."""
    own: float
    """The class's tolerance."""
    perturbed: float
    """Difference of the perturbed run."""

    @property
    def allowed(self) -> float:
        return self.own + TIMES_PERTURBED * self.perturbed

    @property
    def unsteady(self) -> bool:
        """Whether the perturbed run's part dominates, and covers most of the decrease."""
        return TIMES_PERTURBED * self.perturbed > self.own and self.allowed > MAX_ALLOWED * self.learned


def _later(curve: Sequence[float]) -> float:
    half = len(curve) // 2
    return sum(curve[half:]) / len(curve[half:])


def _quarters(*curves: Sequence[float]) -> Iterator[tuple[str, list[float]]]:
    """The name of each non-empty quarter of the steps and the curves' means."""
    names, count = ("first", "second", "third", "last"), len(curves[0])
    cuts = [count * quarter // 4 for quarter in range(5)]
    for name, start, stop in zip(names, cuts[:-1], cuts[1:], strict=True):
        if stop > start:
            yield name, [sum(curve[start:stop]) / (stop - start) for curve in curves]


def _room(reference: Sequence[float], perturbed: Sequence[float] | None) -> _Allowance:
    """The decrease is from the first loss of the plain run to its mean over the second half."""
    learned = abs(reference[0] - _later(reference))
    own = max(STATISTICAL_LEARNED * learned, STATISTICAL_LOSS * _later(reference))
    return _Allowance(learned, own, abs(_later(perturbed) - _later(reference)) if perturbed else 0.0)


def compare_curves(
    losses: Sequence[float], reference: Sequence[float], perturbed: Sequence[float] | None
) -> ParityVerdict:
    """Whether a loss curve is within the tolerance of another on the same batches."""
    return _judge_curve(losses, reference, PerturbedRun(perturbed, perturbed) if perturbed else None)


def unsteady(reference: Sequence[float], perturbed: Sequence[float]) -> bool:
    """Whether the perturbed run drifts too far to judge loss curves."""
    return _room(reference, perturbed).unsteady


def _judge_curve(
    losses: Sequence[float], reference: Sequence[float], perturbed: PerturbedRun | None
) -> ParityVerdict:
    """Compare loss curves."""
    room = _room(reference, perturbed.losses if perturbed else None)
    off = abs(_later(losses) - _later(reference))
    gap = off / room.learned if room.learned else None
    equal = off <= room.allowed
    why = (
        f"from {reference[0]:.3f} the loss went to {_later(losses):.3f} (mean of the second half) against "
        f"{_later(reference):.3f}: off by {off:.1e}, {'within' if equal else 'beyond'} the tolerance of {room.allowed:.1e}"
    )
    for name, (ours, plain, rounded) in _quarters(
        losses, reference, perturbed.losses if perturbed else reference
    ):
        own = room.own if name != "last" else min(room.own, STATISTICAL_END * plain)
        behind, allowed = abs(ours - plain), own + TIMES_PERTURBED * abs(rounded - plain)
        if equal and behind > allowed:
            why = (
                f"in the {name} quarter of the steps the loss is {ours:.3f} against {plain:.3f}: off by {behind:.1e}, beyond the "
                f"tolerance of {allowed:.1e}"
            )
            return ParityVerdict("different", behind, allowed, why, gap=gap)
    if equal and off > room.own and room.unsteady:
        why += f", but only because plain fp32 from rounded weights is off by {room.perturbed:.1e} itself: too unsteady to judge"
        return ParityVerdict("not judged", off, room.allowed, why, gap=gap)
    return ParityVerdict("equal" if equal else "different", off, room.allowed, why, gap=gap)


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference)


@torch.no_grad()
def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of every gradient by name."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
