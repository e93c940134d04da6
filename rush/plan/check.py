"""Hold plans against what was measured: the error table of `rush plan --check`.

Efficiencies are fitted to a third of the findings and judged on the rest. Memory is judged on eager recipes: what a
compiled graph keeps was read off the findings themselves. Published measurements of other trainers on other machines are compared as they are.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rush.plan.calibration import calibrate, third
from rush.plan.efficiency import DEFAULT, Efficiency
from rush.plan.findings import Case, read_findings
from rush.plan.memory import memory_of
from rush.plan.published import Published, read_published
from rush.plan.time import time_of, tokens_per_s

TARGETS = {
    "memory": (0.03, 0.08),
    "time": (0.06, 0.15),
    "published": (0.15, None),
    "published memory": (0.15, None),
}
"""Wanted: the median error and the 95th percentile."""


@dataclass(frozen=True)
class Row:
    """One comparison. Errors are planned over measured, less one."""

    study: str
    name: str
    kind: str
    """memory or time of a finding; published."""
    measured: float
    planned: float
    held_out: bool
    unit: str

    @property
    def error(self) -> float:
        return self.planned / self.measured - 1


@dataclass(frozen=True)
class Summary:
    kind: str
    cases: int
    median: float
    p95: float
    worst: float
    wanted_median: float
    wanted_p95: float | None

    @property
    def reached(self) -> bool:
        return self.median <= self.wanted_median and (self.wanted_p95 is None or self.p95 <= self.wanted_p95)


def check(folder: Path) -> tuple[list[Row], list[Summary], Efficiency]:
    """All comparisons, their summaries (of what was held out), and the efficiencies that the third gave."""
    cases = read_findings(folder)
    learned, _ = third(cases)
    efficiency = calibrate(learned)
    seen = {case.digest for case in learned}
    rows = [row for case in cases for row in _rows(case, efficiency, case.digest not in seen)]
    rows += [row for item in read_published() for row in _published(item)]
    kinds = [kind for kind in TARGETS if any(row.kind == kind for row in rows)]
    return rows, [summarise(kind, [row for row in rows if row.kind == kind]) for kind in kinds], efficiency


def _rows(case: Case, efficiency: Efficiency, held_out: bool) -> list[Row]:
    found = []
    if case.memory_bytes:
        planned = memory_of(case.spec).tensors
        # What a compiled graph and offloading keep was read off findings, so those cases describe more than they test.
        out = not (case.spec.work.number("stream.fused") or case.spec.work.number("offloaded"))
        found.append(Row(case.study, case.name, "memory", case.memory_bytes, planned, out, "bytes"))
    seconds = time_of(case.spec, case.target, efficiency).step
    found.append(Row(case.study, case.name, "time", case.step_s, seconds, held_out, "s"))
    return found


def _published(item: Published) -> list[Row]:
    time = time_of(item.spec, item.target, DEFAULT)
    planned = tokens_per_s(item.spec, time) / item.spec.world
    rows = [Row(item.source, item.name, "published", item.tokens_per_s, planned, True, "tokens/s/device")]
    if item.memory_bytes:
        rows.append(
            Row(
                item.source,
                item.name,
                "published memory",
                item.memory_bytes,
                memory_of(item.spec).reserved,
                True,
                "bytes",
            )
        )
    return rows


def summarise(kind: str, rows: Sequence[Row]) -> Summary:
    """Over what was held out."""
    errors = sorted(abs(row.error) for row in rows if row.held_out)
    median, p95 = TARGETS.get(kind, (0.0, None))
    return Summary(
        kind,
        len(errors),
        statistics.median(errors),
        errors[min(len(errors) - 1, int(0.95 * len(errors)))],
        errors[-1],
        median,
        p95,
    )


def as_json(rows: Sequence[Row], summaries: Sequence[Summary]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(
        json.dumps(
            {
                "rows": [asdict(row) | {"error": row.error} for row in rows],
                "summaries": [asdict(one) | {"reached": one.reached} for one in summaries],
            }
        )
    )
    return plain
