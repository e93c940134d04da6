"""Compares plans with measurements: the error table of `rush plan --check`.

Efficiencies are fitted to a third of the findings and judged on the rest. Memory is judged on eager recipes: what a
compiled graph saves was read from the findings. Published measurements of other trainers are compared unchanged.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rush.plan.calibration import calibrate, calibration_split
from rush.plan.efficiencies import DEFAULT, Efficiencies
from rush.plan.measured_cases import MeasuredCase, read_findings, read_overflows
from rush.plan.memory import memory_of
from rush.plan.planning import plan
from rush.plan.published_runs import PublishedRun, read_published
from rush.plan.time import time_of, tokens_per_s

TARGETS = {
    "memory": (0.03, 0.08),
    "time": (0.06, 0.15),
    "published": (0.15, None),
    "published memory": (0.15, None),
}
"""Targets of the median error and the 95th percentile."""

ON_CPU = "time on a CPU"
"""Efficiencies are a GPU's, so CPU times are listed separately, without a target."""


@dataclass(frozen=True)
class ErrorRow:
    """One comparison; the error is planned / measured − 1."""

    study: str
    name: str
    kind: str
    """A key of `TARGETS`, or `ON_CPU`."""
    measured: float
    planned: float
    held_out: bool
    unit: str
    waits: bool | None = None
    """For times with a profile, whether the step was bound by the host."""

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1


@dataclass(frozen=True)
class OverflowCheck:
    """One recipe that ran out of memory, and its plan."""

    study: str
    name: str
    planned: float
    limit: float
    beyond_host: bool = False
    """Whether its offloaded memory does not fit the host."""

    @property
    def said_to_fit(self) -> bool:
        return self.planned <= self.limit and not self.beyond_host


@dataclass(frozen=True)
class ErrorSummary:
    kind: str
    cases: int
    median: float
    p95: float
    worst: float
    wanted_median: float | None
    wanted_p95: float | None

    @property
    def reached(self) -> bool:
        wanted = ((self.median, self.wanted_median), (self.p95, self.wanted_p95))
        return all(limit is None or found <= limit for found, limit in wanted)


def check(folder: Path) -> tuple[list[ErrorRow], list[ErrorSummary], Efficiencies]:
    """All comparisons, their summaries (over the held-out cases), and the fitted efficiencies."""
    cases = read_findings(folder)
    learned, _ = calibration_split(cases)
    efficiency = calibrate(learned)
    seen = {case.digest for case in learned}
    rows = [row for case in cases for row in _rows(case, efficiency, case.digest not in seen)]
    rows += [row for item in read_published() for row in _published(item)]
    kinds = {kind: [row for row in rows if row.kind == kind] for kind in TARGETS}
    kinds[ON_CPU] = [row for row in rows if row.kind == ON_CPU]
    kinds["time, host-bound"] = [row for row in kinds["time"] if row.waits]
    kinds["time, device-bound"] = [row for row in kinds["time"] if row.waits is False]
    judged = {kind: some for kind, some in kinds.items() if any(row.held_out for row in some)}
    return rows, [summarize(kind, some) for kind, some in judged.items()], efficiency


def overflows(folder: Path) -> list[OverflowCheck]:
    """Plans of everything that ran out of memory."""
    return [
        OverflowCheck(
            one.study, one.name, memory_of(one.spec).total, one.target.memory_bytes, not found.host_fits
        )
        for one in read_overflows(folder)
        for found in [plan(one.spec, one.target, limits=False)]
    ]


def other_splits(folder: Path, draws: int = 20) -> list[ErrorSummary]:
    """Times judged with other splits: the variance of the result."""
    cases = read_findings(folder)
    found = []
    for draw in range(draws):
        learned, judged = calibration_split(cases, f", draw {draw}")
        efficiency = calibrate(learned)
        rows = [row for case in judged for row in _rows(case, efficiency, True) if row.kind == "time"]
        found.append(summarize("time", rows))
    return found


def _rows(case: MeasuredCase, efficiency: Efficiencies, held_out: bool) -> list[ErrorRow]:
    found = []
    if case.memory_bytes:
        planned = memory_of(case.spec).tensors
        # Terms of compiled graphs and offloading were read from findings, so those cases are no test.
        out = not (case.spec.work.number("stream.fused") or case.spec.work.number("offloaded"))
        found.append(ErrorRow(case.study, case.name, "memory", case.memory_bytes, planned, out, "bytes"))
    seconds = time_of(case.spec, case.target, efficiency).step
    waits = case.waits if case.breakdown_s else None
    kind = "time" if case.target.kind == "cuda" else ON_CPU
    found.append(ErrorRow(case.study, case.name, kind, case.step_s, seconds, held_out, "s", waits))
    return found


def _published(item: PublishedRun) -> list[ErrorRow]:
    time = time_of(item.spec, item.target, DEFAULT)
    planned = tokens_per_s(item.spec, time) / item.spec.world
    rows = [
        ErrorRow(item.source, item.name, "published", item.tokens_per_s, planned, True, "tokens/s/device")
    ]
    if item.memory_bytes:
        reserved = memory_of(item.spec).reserved
        rows.append(
            ErrorRow(item.source, item.name, "published memory", item.memory_bytes, reserved, True, "bytes")
        )
    return rows


def summarize(kind: str, rows: Sequence[ErrorRow]) -> ErrorSummary:
    """Over the held-out cases."""
    errors = sorted(abs(row.error) for row in rows if row.held_out)
    median, p95 = TARGETS.get(kind, (None, None))
    return ErrorSummary(
        kind,
        len(errors),
        statistics.median(errors),
        errors[min(len(errors) - 1, int(0.95 * len(errors)))],
        errors[-1],
        median,
        p95,
    )


def as_json(
    rows: Sequence[ErrorRow],
    summaries: Sequence[ErrorSummary],
    drawn: Sequence[ErrorSummary] = (),
    rooms: Sequence[OverflowCheck] = (),
) -> dict[str, Any]:
    found = {
        "rows": [asdict(row) | {"error": row.error} for row in rows],
        "summaries": [asdict(one) | {"reached": one.reached} for one in summaries],
        "other_thirds": [asdict(one) | {"reached": one.reached} for one in drawn],
        "out_of_memory": [asdict(one) | {"said_to_fit": one.said_to_fit} for one in rooms],
    }
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain
