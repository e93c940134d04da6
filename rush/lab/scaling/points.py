"""From trials on ranks to the points of a record: speed, efficiency, exposed communication, memory, parity and verdict.

Only ranks with the evidence of their layout and parity with one rank get an efficiency. Ranks that shared a device get neither
speed nor efficiency.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rush.errors import RushError
from rush.hardware import Machine
from rush.lab.ladder.findings import FORMULAS as LADDER
from rush.lab.ladder.findings import measured
from rush.lab.paired import Floors, compare
from rush.lab.scaling.layouts import ONE
from rush.lab.statistics import Ratio, median_interval
from rush.lab.trial.found import RankFound, TraceFound
from rush.lab.trial.state import TrialState
from rush.lab.trial.trial import Outcome
from rush.plan import plan, spec_of, target_here
from rush.profiling.comm_overlap import HOW
from rush.recipe import Recipe
from rush.recipe_io import write_toml
from rush.records.loss_curves import CLOSE, Tolerance
from rush.records.scaling import ExposedCommunication, PointComparison, PointRecord, ScalingEfficiency

SAME: Mapping[str, Tolerance] = {**CLOSE, "float32": Tolerance(loss=1e-5, grad_norm=1e-4, gradient=1e-5)}
"""How far ranks may be from one rank with the same techniques: the order of additions, in the matmuls' dtype."""

FORMULAS = {
    "tokens_per_s": "tokens of one optimizer step of all ranks, accumulation included, over the time of the slowest rank, the "
    "wait for data included; the median of the processes' medians",
    "ci95": LADDER["ci95"],
    "strong scaling": "the same tokens in a step on every number of devices",
    "weak scaling": "tokens of a step in proportion to the devices; at the largest number as many as in strong scaling",
    "efficiency": "tokens per second and device over those of one device with the same kind of scaling (or of the layout's "
    "smallest number of devices, where one device could not be measured); its interval is the bootstrap's, and at least "
    "what the spread between processes of one recipe gives; from paired batches where possible, as in a ladder. Only beside a "
    "parity verdict of equal",
    "exposed": f"on a GPU {HOW['cuda']}; on a CPU {HOW['cpu']}. Over the time of a profiled step, of the rank with the "
    "largest share; waiting for a slower rank counts",
    "memory_bytes": f"of every rank: {LADDER['peak_memory_bytes']}",
    "parity": "against one rank with the same techniques, from the same weights on the same batches: loss and gradient norm of "
    "every step, in fp32 to 1e-5 and 1e-4",
    "predicted_tokens_per_s": "by `rush plan`, from the rates measured on this machine's GPUs and the links its catalog has; "
    "no number of this study is in it",
    "bus_bytes_per_s": "bytes of the whole buffer over the time of the slowest rank, times 2(n-1)/n for an all-reduce, (n-1)/n "
    "for an all-gather or a reduce-scatter, 1 for a message to a neighbor: what each link carries, as nccl-tests "
    "defines it (NVIDIA/nccl-tests, doc/PERFORMANCE.md)",
}


@dataclass
class ScalingPoint(TrialState):
    """A point being measured, with its trials so far."""

    layout: str
    devices: int
    scalings: list[str]
    peers: bool
    shared: bool
    recipe: Recipe | None
    """None if the layout was refused."""
    refused: str | None = None
    sizes: dict[str, int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    parity: dict[str, Any] | None = None
    predicted: float | None = None
    """Tokens per second, by the planner."""

    @property
    def name(self) -> str:
        peers = "" if self.peers else ", no peer-to-peer"
        return self.layout if self.layout == ONE else f"{self.layout} on {self.devices}{peers}"

    @property
    def ranks(self) -> list[RankFound]:
        return list(self.outcomes[0].found.get("ranks", [])) if self.outcomes else []

    @property
    def evidence(self) -> list[dict[str, Any]]:
        """The evidence of rank 0; a technique took effect only if it did on every rank."""
        every = [rank.get("evidence") or [] for rank in self.ranks]
        found = []
        for row in every[0] if every else []:
            same = [
                (k, o) for k, rows in enumerate(every) for o in rows if o["technique"] == row["technique"]
            ]
            without = next(((k, o) for k, o in same if not o["took_effect"]), None)
            found.append(
                row if without is None else {**without[1], "what": f"rank {without[0]}: {without[1]['what']}"}
            )
        return found

    @property
    def required(self) -> dict[str, int]:
        return self.sizes

    @property
    def reason(self) -> str | None:
        if self.refused is not None:
            return self.refused
        reasons = [outcome.reason for outcome in self.outcomes if outcome.reason]
        return "; ".join([*reasons[:1], *self.without_effect]) or None

    @property
    def verdict(self) -> str:
        if self.status != "ok":
            return self.status.replace("_", " ")
        parity = self.parity["verdict"] if self.parity else "not judged"
        if parity != "equal":
            return str(parity)
        if self.shared:
            return "shared device"
        return "baseline" if self.layout == ONE else "equal"

    @property
    def memory(self) -> list[int]:
        """The peak of each rank over its processes."""
        every = [[rank.get("peak_memory_bytes") for rank in o.found.get("ranks", [])] for o in self.outcomes]
        whole = [[int(peak) for peak in row if peak is not None] for row in every if row and None not in row]
        return [max(row[rank] for row in whole) for rank in range(len(whole[0]))] if whole else []


def predicted(recipe: Recipe, machine: Machine, ceilings: Mapping[str, Any] | None) -> float | None:
    """Tokens per second that the planner expects, from this machine's measured rates; None where it cannot.

    Its arithmetic is for GPUs: the rates of a CPU are those of all cores, of which a rank here has a part.
    """
    if ceilings is None or machine.device != "cuda":
        return None
    try:
        return plan(spec_of(recipe), target_here(machine, ceilings), limits=False).tokens_per_s
    except RushError:
        return None


def point_of(point: ScalingPoint, points: Sequence[ScalingPoint], floors: Floors) -> PointRecord:
    """The record of a point, from its trials so far."""
    timing, recipe = next(iter(point.timings), None), point.recipe
    record: PointRecord = {
        "layout": point.layout,
        "sizes": point.sizes,
        "devices": point.devices,
        "scalings": point.scalings,
        "peer_to_peer": point.peers,
        "shared": point.shared,
        "backend": point.outcomes[0].found.get("backend") if point.outcomes else None,
        "status": point.status,
        "reason": point.reason,
        "verdict": point.verdict,
        "recipe": write_toml(recipe) if recipe else "",
        "digest": recipe.digest if recipe else "",
        "techniques": [name for name, _ in recipe.technique_uses()] if recipe else [],
        "step_tokens": recipe.step_tokens if recipe else 0,
        "tokens_per_s": None,
        "step_ms": None,
        "efficiency": {},
        "exposed": exposed_of(point),
        "memory_bytes": point.memory or None,
        "evidence": point.evidence,
        "parity": point.parity,
        "predicted_tokens_per_s": point.predicted,
        "compile_s": timing["compile_s"] if timing else None,
        "warmup_s": timing["warmup_s"] if timing else None,
        "environment": dict(timing["environment"]) if timing else {},
    }
    if point.processes and not point.shared:
        steps = [[1000 * seconds for seconds in t["samples_s"]] for t in point.timings]
        record["tokens_per_s"] = measured(median_interval(point.processes), point.processes)
        record["step_ms"] = measured(median_interval(steps), steps)
    if point.verdict == "equal":
        record["efficiency"] = dict(_efficiencies(point, points, floors))
    return record


def _efficiencies(
    point: ScalingPoint, points: Sequence[ScalingPoint], floors: Floors
) -> Iterator[tuple[str, ScalingEfficiency]]:
    for scaling in point.scalings:
        base = _base(point, points, scaling)
        if base is not None and point.processes:
            ratio = compare(base.timed, point.timed, floors)
            yield scaling, _over(base, ratio, base.devices / point.devices)


def _over(base: ScalingPoint, ratio: Ratio, part: float = 1.0) -> ScalingEfficiency:
    """A speed relative to that of `base`, times the part of its devices."""
    return {
        "ratio": ratio.ratio * part,
        "ci95": [ratio.low * part, ratio.high * part],
        "over": base.name,
        "paired": ratio.paired,
    }


def _base(point: ScalingPoint, points: Sequence[ScalingPoint], scaling: str) -> ScalingPoint | None:
    """What a point's efficiency is over: one device, or the layout's own smallest number of devices that was measured."""
    able = [
        s
        for s in points
        if s.processes and not s.shared and scaling in s.scalings
        if s.devices < point.devices or s.layout == ONE
    ]
    one = next((s for s in able if s.layout == ONE and s.verdict == "baseline"), None)
    own = [s for s in able if s.layout == point.layout and s.peers == point.peers and s.verdict == "equal"]
    return one or min(own, key=lambda s: s.devices, default=None)


def exposed_of(point: ScalingPoint) -> ExposedCommunication | None:
    figures = []
    for rank in point.ranks:
        exposed, step = rank.get("exposed_ms"), rank.get("profiled_step_ms")
        if exposed is None or not step:
            return None
        figures.append((exposed / step, exposed, rank.get("exchange_ms") or 0.0, step))
    if point.layout == ONE or point.shared or not figures:
        return None
    share, exposed_ms, exchange_ms, step_ms = max(figures, key=lambda row: row[0])
    return {
        "share": share,
        "exposed_ms": exposed_ms,
        "exchange_ms": exchange_ms,
        "step_ms": step_ms,
        "ranks": [row[0] for row in figures],
    }


def comparisons_of(points: Sequence[ScalingPoint], floors: Floors) -> list[PointComparison]:
    """ZeRO-2 against ZeRO-3, and each layout with against without peer-to-peer, where both were measured and learn the same."""
    found = []
    for first in points:
        for second in points:
            alike = first.devices == second.devices and first.scalings == second.scalings
            stages = (first.layout, second.layout) == ("zero2", "zero3") and first.peers == second.peers
            peers = first.layout == second.layout and first.peers and not second.peers
            if alike and (stages or peers) and first.verdict == second.verdict == "equal":
                what = "ZeRO-2 against ZeRO-3" if stages else "with against without peer-to-peer"
                found.append(_compare(what, first, second, floors))
    return found


def _compare(what: str, first: ScalingPoint, second: ScalingPoint, floors: Floors) -> PointComparison:
    ratio = compare(first.timed, second.timed, floors)
    return {
        "what": what,
        "first": first.name,
        "second": second.name,
        "devices": first.devices,
        "scalings": first.scalings,
        "speed": _over(first, ratio),
        "real": ratio.real,
        "memory": max(second.memory) / max(first.memory) if first.memory and second.memory else None,
    }


def judged(ours: TraceFound | None, one: TraceFound | None, why: str | None) -> dict[str, Any]:
    """The parity part of a point: its trace against that of one rank."""
    empty: dict[str, Any] = {
        "losses": [],
        "reference_losses": [],
        "grad_norms": [],
        "reference_grad_norms": [],
    }
    if ours is None or one is None:
        reason = why or (
            "its steps could not be traced" if ours is None else "one rank could not be traced here"
        )
        return {
            "verdict": "not judged",
            "class": "CLOSE",
            "tolerance": None,
            "worst": None,
            "steps": 0,
            **empty,
            "why": reason,
        }
    allowed = SAME.get(ours["dtype"], SAME["bfloat16"])  # fp8
    off = [
        (_apart(mine, theirs), limit, f"the {what} of step {step}")
        for what, found, expected, limit in (
            ("loss", ours["losses"], one["losses"], allowed.loss),
            ("gradient norm", ours["grad_norms"], one["grad_norms"], allowed.grad_norm),
        )
        for step, (mine, theirs) in enumerate(zip(found, expected, strict=True), start=1)
    ]
    worst, limit, what = max(off, key=lambda row: row[0] / row[1])
    equal = worst <= limit
    apart = f"{what} is off by {worst:.1e}, {'within' if equal else 'beyond'} the {limit:.1e} of rounding in {ours['dtype']}"
    return {
        "verdict": "equal" if equal else "different",
        "class": "CLOSE",
        "tolerance": limit,
        "worst": worst if math.isfinite(worst) else None,
        "steps": len(ours["losses"]),
        "losses": ours["losses"],
        "reference_losses": one["losses"],
        "grad_norms": ours["grad_norms"],
        "reference_grad_norms": one["grad_norms"],
        "why": apart if worst > 0 else "every loss and every gradient norm is the same number",
    }


def _apart(ours: float | None, one: float | None) -> float:
    """The relative difference; a number that is none (written as null) is infinitely far."""
    if ours is None or one is None or not (math.isfinite(ours) and math.isfinite(one)):
        return math.inf
    return abs(ours - one) / abs(one) if one else (0.0 if ours == one else math.inf)
