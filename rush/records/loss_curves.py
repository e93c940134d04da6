"""Loss curves against plain fp32's: how far one may be off, step by step and over a run, and what rounding explains.

Training amplifies differences, and how fast depends on model, data and learning rate. So there is a perturbed
reference run: plain as well, from weights rounded to bf16 once. Its difference at a step is what one rounding grows
to by then; a technique may differ by its tolerance plus a few times that.

No torch: a page that is drawn from a record judges its curves by this rule too (`rush/records/parity.py`). Gradients are
judged where they are (`rush/techniques/api/tolerances.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rush.records.step_gap import more_steps, more_steps_words


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
MEASURED = ("same bits", "rounding", "statistical")
"""What a run is found to be equal by, the finest first."""


def close_tolerance(dtype: str) -> Tolerance:
    """What rounding in this dtype explains; of dtypes shorter than bf16 (fp8) as much as of bf16."""
    return CLOSE.get(dtype, CLOSE["bfloat16"])


def growth(dtype: str) -> float:
    """How many times the perturbed run's difference rounding in this dtype may grow to."""
    return TIMES_PERTURBED * _ROUNDING.get(dtype, 1.0)


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
    more_steps: float | None = None
    """The same in steps: the fraction more of them that the loss of the reference takes."""


def step_differences(
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


def unsteady(reference: Sequence[float], perturbed: Sequence[float]) -> bool:
    """Whether the perturbed run drifts too far to judge loss curves."""
    return _room(reference, perturbed).unsteady


def compare_curves(
    losses: Sequence[float], reference: Sequence[float], perturbed: Sequence[float] | None
) -> ParityVerdict:
    """Whether a loss curve is within the tolerance of another on the same batches. `perturbed`: that of the perturbed run."""
    room = _room(reference, perturbed)
    off = abs(_later(losses) - _later(reference))
    gap = off / room.learned if room.learned else None
    more = more_steps(losses, reference)
    equal = off <= room.allowed
    why = (
        f"from {reference[0]:.3f} the loss went to {_later(losses):.3f} (mean of the second half) against "
        f"{_later(reference):.3f}: off by {off:.1e}, {'within' if equal else 'beyond'} the tolerance of {room.allowed:.1e}"
    )
    for name, (ours, plain, rounded) in _quarters(losses, reference, perturbed or reference):
        own = room.own if name != "last" else min(room.own, STATISTICAL_END * plain)
        behind, allowed = abs(ours - plain), own + TIMES_PERTURBED * abs(rounded - plain)
        if equal and behind > allowed:
            why = (
                f"in the {name} quarter of the steps the loss is {ours:.3f} against {plain:.3f}: off by {behind:.1e}, beyond the "
                f"tolerance of {allowed:.1e}"
            )
            return ParityVerdict(
                "different", behind, allowed, f"{why}; {more_steps_words(more)}", gap=gap, more_steps=more
            )
    if equal and off > room.own and room.unsteady:
        why += f", but only because plain fp32 from rounded weights is off by {room.perturbed:.1e} itself: too unsteady to judge"
        return ParityVerdict("not judged", off, room.allowed, why, gap=gap, more_steps=more)
    why += f"; {more_steps_words(more)}"
    return ParityVerdict("equal" if equal else "different", off, room.allowed, why, gap=gap, more_steps=more)


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / max(abs(reference), 1e-30)
