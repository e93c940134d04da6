"""Does it still learn the same? Runs held against plain fp32, with tolerances in one place.

Two runs from the same weights on the same batches give losses and gradient norms step by step, and the
gradient of each tensor at step one. How far they may be apart is the technique's declared class and the
dtype the matmuls ran in: EXACT means the same bits; CLOSE allows what rounding explains; STATISTICAL
compares how much was learned, because weights that are themselves rounded drift apart.

Training amplifies: two runs that differ in the last bits differ more at every step, and how fast depends on
the model, the data and the learning rate. So the plain run has a twin, plain as well, that starts from
weights rounded to bf16 once. How far the twin is off at a step is what one rounding grows to by then; a
technique may be off by its tolerance and a few times that, and no more.

The tolerances are calibrated: a few times the worst that correct techniques showed over seeds and two
families (the figures stand beside them), and below what the smallest planted bug showed, one tensor's
gradient off by 1 %. In bf16 rounding alone puts a gradient off by more than that, so such a bug must be
looked for in fp32: a technique is judged in fp32 wherever it can run there.
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
CLOSE_STEPS = 20
"""Steps that CLOSE is held to one by one: with more, rounding alone has grown too far in one or another. Of a longer run the curve
counts as well, as with STATISTICAL."""
STATISTICAL_LEARNED = 0.05
"""Of what was learned, the fall of the loss to its mean over the second half of the steps: by how much that mean may differ, and that
of each quarter. Seen in the first quarter of 200 steps on an H200: sound recipes were off by 0.0 to 0.5 %; bf16 weights rounded to the
nearest, which lose the small updates of a warm-up, by 20 %, and came within the 5 % later."""
STATISTICAL_LOSS = 0.003
"""Of the loss itself, where hardly anything was learned yet: ten times what rounding to bf16 showed."""
STATISTICAL_END = 0.02
"""Of the loss, in the mean of the last quarter of the steps: a run that falls behind shows there first, while a share of what was
learned from random weights, most of it how often words occur, hides it. Seen over 200 steps on an H200: sound recipes were off by 0.03
to 0.8 %; one whose head summed its 8-bit gradients in short accumulators by 7.2 %, growing, and was within 5 % of what was learned."""
MAX_ALLOWED = 0.5
"""Of what was learned: a run that is off by more than its class allows is not called equal for the twin's sake where the twin
gives more room than this. Seen with the `tiny` recipe, whose loss jumps at single steps: 0.63 of 0.79 were allowed, and what was
called equal over 20 steps had learned less after 200."""
TIMES_PERTURBED = 6.0
"""A technique rounds in every product, the twin once, and where training is chaotic both are single draws. Seen in the
gradient norm of step 10 of Llama 3.2 1B on an H200, eleven correct bf16 rungs: 1.0 to 4.2 times the twin's."""
# Half a unit in the last place, over that of bfloat16, which the twin's weights were rounded to.
_ROUNDING = {"float32": 2.0**-16, "tf32": 2.0**-3, "float16": 2.0**-3, "bfloat16": 1.0}


class PerturbedRun(NamedTuple):
    """The plain run from weights that were rounded to bf16 once."""

    losses: Sequence[float]
    grad_norms: Sequence[float]


class ParityVerdict(NamedTuple):
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
    norms = {name: _norm(gradient) for name, gradient in reference.items()}
    floor = 1e-3 * math.sqrt(sum(norm**2 for norm in norms.values()) / max(1, len(norms)))
    return {
        name: _norm(_wide(ours[name]) - _wide(gradient)) / max(norms[name], floor)
        for name, gradient in reference.items()
    }


def _wide(gradient: Tensor) -> Tensor:
    """Wide enough for a difference; float64 for all of a large model's would take most of the time of a comparison."""
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
    twin: PerturbedRun | None = None,
) -> ParityVerdict:
    """Hold a run against the plain one. `dtype` is that of the matmuls: float32, tf32, bfloat16 or float16."""
    assert len(losses) == len(reference_losses) == len(grad_norms) == len(reference_grad_norms) > 0
    if parity is Parity.CHANGES:
        return ParityVerdict("not judged", None, None, "what is learned differs by design")
    if not all(map(math.isfinite, [*losses, *grad_norms])):
        return ParityVerdict("different", None, None, "a loss or gradient norm is not finite")
    if parity is Parity.STATISTICAL:
        return _judge_curve(losses, reference_losses, twin)
    exact = parity is Parity.EXACT
    first = len(losses) if exact else CLOSE_STEPS
    allowed = Tolerance(0.0, 0.0, 0.0) if exact else CLOSE[dtype]
    grown = 0.0 if exact else TIMES_PERTURBED * _ROUNDING[dtype]
    found = [
        *_steps("loss", allowed.loss, grown, losses[:first], reference_losses[:first], twin and twin.losses),
        *_steps(
            "gradient norm",
            allowed.grad_norm,
            grown,
            grad_norms[:first],
            reference_grad_norms[:first],
            twin and twin.grad_norms,
        ),
        *((error, allowed.gradient, f"the gradient of {name}") for name, error in gradient_errors.items()),
    ]
    worst, tolerance, what = max(found, key=lambda item: item[0] / item[1] if item[1] else item[0])
    equal = worst <= tolerance
    if exact and equal:
        return ParityVerdict("equal", worst, tolerance, f"the same bits over {len(losses)} steps")
    relation = "within" if equal else "beyond"
    kind = "the same bits" if exact else f"rounding in {dtype}"
    told = f"{what} is off by {worst:.1e}, {relation} the {tolerance:.1e} of {kind}"
    if equal and len(losses) > first:
        curve = _judge_curve(losses, reference_losses, twin)
        if curve.verdict != "equal":
            return curve
        told += f" in the first {first} steps; over all {curve.why}"
    return ParityVerdict("equal" if equal else "different", worst, tolerance, told)


def _steps(
    what: str,
    tolerance: float,
    grown: float,
    ours: Sequence[float],
    reference: Sequence[float],
    twin: Sequence[float] | None,
) -> Iterator[tuple[float, float, str]]:
    """For every step: the difference found, the one allowed, and its name."""
    for step, (own, plain) in enumerate(zip(ours, reference, strict=True)):
        more = grown * _relative(twin[step], plain) if twin else 0.0
        yield _relative(own, plain), tolerance + more, f"the {what} of step {step + 1}"


class _Allowance(NamedTuple):
    """How far a run may be off, as the loss that it learns."""

    learned: float
    """By the plain run."""
    own: float
    """What the class allows."""
    twin: float
    """What the twin is off."""

    @property
    def allowed(self) -> float:
        return self.own + TIMES_PERTURBED * self.twin

    @property
    def unsteady(self) -> bool:
        """Whether the twin's part is what allows, and covers most of what was learned."""
        return TIMES_PERTURBED * self.twin > self.own and self.allowed > MAX_ALLOWED * self.learned


def _later(curve: Sequence[float]) -> float:
    half = len(curve) // 2
    return sum(curve[half:]) / len(curve[half:])


def _quarters(*curves: Sequence[float]) -> Iterator[tuple[str, list[float]]]:
    """Of each quarter of the steps its name and the curves' means; of three steps or fewer there are no four."""
    names, count = ("first", "second", "third", "last"), len(curves[0])
    cuts = [count * quarter // 4 for quarter in range(5)]
    for name, start, stop in zip(names, cuts[:-1], cuts[1:], strict=True):
        if stop > start:
            yield name, [sum(curve[start:stop]) / (stop - start) for curve in curves]


def _room(reference: Sequence[float], twin: Sequence[float] | None) -> _Allowance:
    """What was learned goes from the first loss of the plain run to the mean over the second half."""
    learned = abs(reference[0] - _later(reference))
    own = max(STATISTICAL_LEARNED * learned, STATISTICAL_LOSS * _later(reference))
    return _Allowance(learned, own, abs(_later(twin) - _later(reference)) if twin else 0.0)


def unsteady(reference: Sequence[float], twin: Sequence[float]) -> bool:
    """Whether plain training from weights rounded once drifts so far that nothing could be told from it by how much is learned."""
    return _room(reference, twin).unsteady


def _judge_curve(
    losses: Sequence[float], reference: Sequence[float], twin: PerturbedRun | None
) -> ParityVerdict:
    """How much was learned."""
    room = _room(reference, twin.losses if twin else None)
    off = abs(_later(losses) - _later(reference))
    equal = off <= room.allowed
    told = (
        f"from {reference[0]:.3f} the loss went to {_later(losses):.3f} (mean of the second half) against "
        f"{_later(reference):.3f}: off by {off:.1e}, {'within' if equal else 'beyond'} the {room.allowed:.1e} of learning the same"
    )
    for name, (ours, plain, rounded) in _quarters(losses, reference, twin.losses if twin else reference):
        own = room.own if name != "last" else min(room.own, STATISTICAL_END * plain)
        behind, allowed = abs(ours - plain), own + TIMES_PERTURBED * abs(rounded - plain)
        if equal and behind > allowed:
            told = (
                f"in the {name} quarter of the steps the loss is {ours:.3f} against {plain:.3f}: off by {behind:.1e}, beyond the "
                f"{allowed:.1e} of learning the same"
            )
            return ParityVerdict("different", behind, allowed, told)
    if equal and off > room.own and room.unsteady:
        told += f", but only because plain fp32 from rounded weights is off by {room.twin:.1e} itself: too unsteady to tell"
        return ParityVerdict("not judged", off, room.allowed, told)
    return ParityVerdict("equal" if equal else "different", off, room.allowed, told)


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference)


@torch.no_grad()
def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of every gradient by name, as they are now."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}
