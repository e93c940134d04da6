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

from rush.plan.efficiency import DEFAULT, Efficiency
from rush.plan.findings import Case
from rush.plan.terms import kernels
from rush.plan.time import Time, matmul_dtype, time_of

PARTS = {
    "matmul": "matmul",
    "attention": "attention",
    "elementwise": "norm_elementwise",
    "loss": "loss",
    "optimizer": "optimizer",
}
"""Our parts and the breakdown's names for them."""


def third(cases: Sequence[Case]) -> tuple[list[Case], list[Case]]:
    """A third to calibrate on and the rest to judge by, chosen by a hash of the cases' names."""

    def lot(case: Case) -> str:
        return hashlib.sha256(f"{case.study}/{case.name}/{case.spec.micro}".encode()).hexdigest()

    ordered = sorted((case for case in cases if case.breakdown_s), key=lot)
    chosen = {case.digest for case in ordered[::3]}
    return [c for c in cases if c.digest in chosen], [c for c in cases if c.digest not in chosen]


def calibrate(cases: Iterable[Case], start: Efficiency = DEFAULT) -> Efficiency:
    """The efficiencies that these cases show."""
    timed = [(case, time_of(case.spec, case.target, start)) for case in cases if case.breakdown_s]
    usual = [(c, t) for c, t in timed if not (_work(c, "loss.bytes") or _work(c, "offloaded"))]
    matmul = dict(start.matmul)
    for dtype in matmul:
        of_dtype = [(c, t) for c, t in usual if _main_dtype(c) == dtype]
        matmul[dtype] *= _ratio(of_dtype, "matmul")
    attention = kernels() | dict(start.attention)
    for kernel in attention:
        attention[kernel] *= _ratio([(c, t) for c, t in usual if c.spec.uses(kernel)], "attention")
    cored = [(c, t) for c, t in usual if _work(c, "attention")]
    eager = [(c, t) for c, t in cored if not (_work(c, "stream.fused") or _work(c, "launches.pass"))]
    fused = [(c, t) for c, t in cored if _work(c, "stream.fused")]
    updates = [(c, t) for c, t in usual if _work(c, "update.bytes") and not _work(c, "update.reaches")]
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
    return replace(found, launch_s=_launch(cases, found))


def _main_dtype(case: Case) -> str:
    return case.spec.work.name("blocks.dtype", matmul_dtype(case.spec))


def _work(case: Case, term: str) -> float:
    return case.spec.work.number(term)


def _ratio(timed: Sequence[tuple[Case, Time]], part: str) -> float:
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


def _launch(cases: Iterable[Case], found: Efficiency) -> float:
    """Of steps that clearly wait for their host: by how much it must be slower for the step to be as long as it was."""
    pairs = []
    for case in cases:
        time = time_of(case.spec, case.target, found)
        waited = time.parts.get("launching", 0.0)
        if waited > 0.05 * time.step and not _work(case, "update.reaches"):
            pairs.append((1 + (case.step_s - time.step) / time.host, waited))
    return found.launch_s * _weighted_median(sorted(pairs))
