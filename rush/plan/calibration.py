"""Fit the efficiencies to measured steps: each to the part of the breakdown it is about.

A profile says how long products, attention, elementwise operations, loss and update took, so every efficiency has its
own evidence and none has to be guessed from the sum. A median over the cases is taken, because a profile sometimes
files a wait under a part. What no case speaks about stays as it was.
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
"""Our parts and the breakdown's names for them."""


def calibration_split(
    cases: Sequence[MeasuredCase], draw: str = ""
) -> tuple[list[MeasuredCase], list[MeasuredCase]]:
    """A third to calibrate on and the rest to judge by, chosen by a hash of the cases' names; another `draw` gives another."""

    def lot(case: MeasuredCase) -> str:
        return hashlib.sha256(f"{case.study}/{case.name}/{case.spec.micro}{draw}".encode()).hexdigest()

    ordered = sorted((case for case in cases if case.breakdown_s), key=lot)
    chosen = {case.digest for case in ordered[::3]}
    return [c for c in cases if c.digest in chosen], [c for c in cases if c.digest not in chosen]


def calibrate(cases: Iterable[MeasuredCase], start: Efficiencies = DEFAULT) -> Efficiencies:
    """The efficiencies that these cases show."""
    planned = ((case, time_of(case.spec, case.target, start)) for case in cases if case.breakdown_s)
    timed = [(_as_timed(case, time), time) for case, time in planned]
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
    # Where a host's probe says what a call takes, the share of it is fitted; where none does, the call itself.
    probed, others = ([c for c, _ in timed if bool(c.target.launch_s) is known] for known in (True, False))
    share, call = _launching(probed, found), _launching(others, found)
    return replace(found, launching=found.launching * share, launch_s=found.launch_s * call)


def _as_timed(case: MeasuredCase, time: StepTime) -> MeasuredCase:
    """The case with its profile's parts stretched to what its steps took, where these wait for nothing but the device.

    Profiled steps are few, with pauses between them: the device is cooler and clocks higher than in the steps that were
    timed, the more so the shorter they are. The profile says what share each part has, the clock of the timed steps how long.
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
    """Planned over measured seconds of a part: what its efficiency has to be multiplied by.

    The median by weight: a second is a second. Long steps say more about what users run than short ones, between which
    a device cools down and then clocks higher.
    """
    pairs = sorted(
        (time.parts[part] / case.breakdown_s[PARTS[part]], case.breakdown_s[PARTS[part]])
        for case, time in timed
        if case.breakdown_s.get(PARTS[part]) and time.parts.get(part)
    )
    if part == "optimizer":
        # A profile files waits under it, the longer the step: here each case has one voice.
        return statistics.median(ratio for ratio, _ in pairs) if pairs else 1.0
    return _weighted_median(pairs)


def _weighted_median(pairs: Sequence[tuple[float, float]]) -> float:
    """Of (value, weight), sorted; 1 where there are none."""
    left = sum(weight for _, weight in pairs) / 2
    for value, weight in pairs:
        left -= weight
        if left <= 0:
            return value
    return 1.0


def _launching(cases: Sequence[MeasuredCase], found: Efficiencies) -> float:
    """How many times as long a host must take to call an operator for these steps to come out best; 1 where none depends on it.

    Steps that wait for their host say how long it takes, all others that it does not take longer.
    """

    def missed(factor: float) -> float:
        told = replace(found, launch_s=factor * found.launch_s, launching=factor * found.launching)
        return round(sum(abs(time_of(c.spec, c.target, told).step / c.step_s - 1) for c in cases), 4)

    tried = (1.03**step for step in range(-20, 21))
    return min(sorted(tried, key=lambda factor: abs(factor - 1)), key=missed)
