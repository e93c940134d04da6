"""Fits the efficiencies to measured steps, each to its part of the breakdown.

A profile measures matmuls, attention, elementwise operations, loss and update separately, so no efficiency is guessed
from the sum. A median over the cases is used, because a profile sometimes attributes a wait to a part. What no case
covers is unchanged.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rush.plan.effects import attention_kernels
from rush.plan.efficiencies import DEFAULT, Efficiencies
from rush.plan.measured_cases import MeasuredCase
from rush.plan.spec import matmul_dtype
from rush.plan.time import StepTime, time_of

PARTS = {
    "matmul": "matmul",
    "attention": "attention",
    "elementwise": "norm_elementwise",
    "loss": "loss",
    "optimizer": "optimizer",
}
"""Parts of a plan and their names in the breakdown."""


def calibration_split(
    cases: Sequence[MeasuredCase], draw: str = ""
) -> tuple[list[MeasuredCase], list[MeasuredCase]]:
    """A third for calibration and the rest for evaluation, by a hash of the cases' names and `draw`."""

    def lot(case: MeasuredCase) -> str:
        return hashlib.sha256(f"{case.study}/{case.name}/{case.spec.micro}{draw}".encode()).hexdigest()

    ordered = sorted((case for case in cases if case.breakdown_s), key=lot)
    chosen = {case.digest for case in ordered[::3]}
    return [c for c in cases if c.digest in chosen], [c for c in cases if c.digest not in chosen]


def calibrate(cases: Iterable[MeasuredCase], start: Efficiencies = DEFAULT) -> Efficiencies:
    """The efficiencies that these cases show."""
    planned = ((case, time_of(case.spec, case.target, start)) for case in cases if case.breakdown_s)
    timed = [(as_timed(case, time), time) for case, time in planned]
    usual = [(c, t) for c, t in timed if not (_work(c, "loss.bytes") or _work(c, "offloaded"))]
    matmul = dict(start.matmul)
    for dtype in matmul:
        of_dtype = [(c, t) for c, t in usual if _main_dtype(c) == dtype]
        matmul[dtype] *= _ratio(of_dtype, "matmul")
    attention = attention_kernels() | dict(start.attention)
    for kernel in attention:
        attention[kernel] *= _ratio([(c, t) for c, t in usual if c.spec.uses(kernel)], "attention")
    cored = [(c, t) for c, t in usual if _work(c, "attention")]
    eager = [(c, t) for c, t in cored if not (_work(c, "stream.fused") or _work(c, "launches.pass"))]
    fused = [(c, t) for c, t in cored if _work(c, "stream.fused")]
    updates = [(c, t) for c, t in usual if _work(c, "update.bytes") and not _work(c, "update.efficiency")]
    plain_updates = [(c, t) for c, t in usual if not _work(c, "update.bytes")]
    found = replace(
        start,
        matmul=matmul,
        attention=attention,
        eager=start.eager * _ratio(eager, "elementwise"),
        fused=start.fused * _ratio(fused, "elementwise"),
        loss=start.loss * _ratio(usual, "loss"),
        update=start.update * _ratio(updates, "optimizer"),
        eager_update=start.eager_update * _ratio(plain_updates, "optimizer"),
    )
    # With a probe of the host its factor is fitted, without one the launch time itself.
    probed, others = ([c for c, _ in timed if bool(c.target.launch_s) is known] for known in (True, False))
    share, call = fitted_launching(probed, found), fitted_launching(others, found)
    return replace(found, launching=found.launching * share, launch_s=found.launch_s * call)


def as_timed(case: MeasuredCase, time: StepTime) -> MeasuredCase:
    """The case with its profile scaled to the timed steps, where these are bound by the device.

    Profiled steps are few, with pauses between them: the device is cooler and clocks higher than in the timed steps.
    """
    work = sum(seconds for part, seconds in case.breakdown_s.items() if part not in ("idle", "data"))
    if (
        case.waits
        or time.parts.get("launching", 0.0) > 0.02 * time.step
        or case.spec.work.number("offloaded")
        or not work
    ):
        return case
    factor = (case.step_s - time.parts.get("other", 0.0)) / work
    return replace(case, breakdown_s={part: factor * s for part, s in case.breakdown_s.items()})


def _main_dtype(case: MeasuredCase) -> str:
    return case.spec.work.name("blocks.dtype", matmul_dtype(case.spec))


def _work(case: MeasuredCase, term: str) -> float:
    return case.spec.work.number(term)


def _ratio(timed: Sequence[tuple[MeasuredCase, StepTime]], part: str) -> float:
    """Planned over measured seconds of a part, the factor of its efficiency: the median weighted by time, since long steps are
    closer to real runs."""
    pairs = sorted(
        (time.parts[part] / case.breakdown_s[PARTS[part]], case.breakdown_s[PARTS[part]])
        for case, time in timed
        if case.breakdown_s.get(PARTS[part]) and time.parts.get(part)
    )
    if part == "optimizer":
        # A profile attributes waits to it, the more the longer the step: unweighted.
        return statistics.median(ratio for ratio, _ in pairs) if pairs else 1.0
    return _weighted_median(pairs)


def _weighted_median(pairs: Sequence[tuple[float, float]]) -> float:
    """Weighted median of sorted (value, weight) pairs; 1 where there are none."""
    left = sum(weight for _, weight in pairs) / 2
    for value, weight in pairs:
        left -= weight
        if left <= 0:
            return value
    return 1.0


def fitted_launching(cases: Sequence[MeasuredCase], found: Efficiencies) -> float:
    """The factor of the launch time with the smallest error over these steps; 1 where none depends on it."""

    def missed(factor: float) -> float:
        tried = replace(found, launch_s=factor * found.launch_s, launching=factor * found.launching)
        return round(sum(abs(time_of(c.spec, c.target, tried).step / c.step_s - 1) for c in cases), 4)

    factors = (1.03**step for step in range(-20, 21))
    return min(sorted(factors, key=lambda factor: abs(factor - 1)), key=missed)
