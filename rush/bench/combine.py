"""Several records of the same thing as one: the median of all, with an interval over all of them.

Records are of the same thing if they have the same workload, the same baseline, the same techniques with the same knobs
(recipes are identified by content, not by name) and the same kind of machine. If a recipe of that name had other techniques
before, those of its latest record count. A kernel has no recipe: its key, which covers its sources, identifies it.

A record against a baseline of another kind than the workload has now keeps its ratio, in a separate row whose title and verdict
state it: `nanoGPT's setting` was our own plain GPT-2 before `rush.bench.nanogpt`.

A recorded verdict of equal is judged again by the current rule from the recorded losses, since rules have become stricter; a
record that is not equal is not a finding, and its speed is in no median.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, cast

from rush.bench.workloads import FILE, load_workloads
from rush.lab.statistics import Ratio, pooled
from rush.records.kernels import KernelOp
from rush.records.ladder import RungRecord
from rush.records.loss_curves import PerturbedRun
from rush.records.models import ModelRecord, OursRecord, WorkloadRecord, read_models
from rush.report.headlines import machine_name
from rush.report.models import verdict_words
from rush.techniques import Parity
from rush.techniques.api.tolerances import judge


@dataclass(frozen=True)
class CombinedRecord:
    """All records of one workload with one recipe on one kind of machine."""

    record: ModelRecord
    """The latest, with the medians of all in place of its figures."""
    paths: tuple[Path, ...]
    num_equal: int
    former: tuple[Path, ...] = ()
    """Records of a recipe that had this name and other techniques."""

    @property
    def work(self) -> WorkloadRecord:
        return self.record["workloads"][0]

    @property
    def ours(self) -> OursRecord:
        return self.work["ours"][0]

    def judged(self) -> tuple[str, str]:
        """Parity and verdict in words."""
        parity = (self.ours["rung"].get("parity") or {}).get("verdict", "not judged")
        if 0 < self.num_equal < len(self.paths):
            parity = f"equal in {self.num_equal} of {len(self.paths)} records"
        words = verdict_words(dict(self.ours["target"]))
        return parity, f"{words}, of a former baseline" if self.former_baseline else words

    @property
    def former_baseline(self) -> bool:
        return _is_former(self.work)


def combined(results: Path) -> dict[str, list[CombinedRecord]]:
    """By machine, a row for each workload and recipe, in the order of the workloads."""
    groups: dict[tuple[str, str, str], list[tuple[tuple[str, ...], Path, ModelRecord]]] = {}
    for path, record in sorted(model_records(results), key=lambda item: item[1]["started"]):
        for work in record["workloads"]:
            for ours in work.get("ours", ()):
                techniques = _identity(tomllib.loads(ours["rung"]["recipe"]).get("techniques", []))
                one: ModelRecord = {**record, "workloads": [{**work, "ours": [ours]}]}
                title = title_of(work["name"], ours["rung"]["name"])
                key = (machine_kind(record["machine"]), title, work["rival"]["title"])
                groups.setdefault(key, []).append((techniques, path, one))
    order = list(_known())
    found: dict[str, list[CombinedRecord]] = {}
    for (where, *_), measured in groups.items():
        same = [(path, one) for techniques, path, one in measured if techniques == measured[-1][0]]
        former = tuple(path for techniques, path, _ in measured if techniques != measured[-1][0])
        found.setdefault(where, []).append(replace(_combined(same), former=former))
    for rows in found.values():
        rows.sort(key=lambda row: _place(row, order))
    return found


def _place(row: CombinedRecord, order: Sequence[str]) -> tuple[int, bool, bool]:
    name = row.work["name"]
    place = order.index(name) if name in order else len(order)
    return place, row.former_baseline, not row.ours.get("primary", True)


def _combined(records: Sequence[tuple[Path, ModelRecord]]) -> CombinedRecord:
    """One row from the records of one thing, the latest last."""
    works = [record["workloads"][0] for _, record in records]
    proved = [w for w in works if (w["ours"][0]["rung"].get("parity") or {}).get("verdict") == "equal"]
    counted = [w for w in proved or works if w["ours"][0]["target"].get("reached") is not None]
    last = (counted or works)[-1]
    paths = tuple(path for path, _ in records)
    latest = records[-1][1]
    if len(counted) < 2:
        return CombinedRecord({**latest, "workloads": [last]}, paths, len(proved))
    ours = last["ours"][0]
    targets: list[dict[str, Any]] = [dict(work["ours"][0]["target"]) for work in counted]
    ratio = pooled([Ratio(target["reached"], *target["ci95"]) for target in targets])
    target = _retargeted(targets[-1], ratio.ratio, [ratio.low, ratio.high], proved=bool(proved))
    if "memory" in targets[-1]:
        ratios = [
            target["memory"]["reached"] for target in targets if target.get("memory", {}).get("reached")
        ]
        # Its records are its interval: memory does not vary inside one.
        ends = [min(ratios), max(ratios)]
        target["memory"] = _retargeted(targets[-1]["memory"], median(ratios), ends, proved=bool(proved))
    rung = _median_of([work["ours"][0]["rung"] for work in counted])
    rival = _median_of([work["rival"] for work in counted])
    work = {**last, "rival": rival, "ours": [{**ours, "rung": rung, "target": target}]}
    return CombinedRecord(cast(ModelRecord, {**latest, "workloads": [work]}), paths, len(proved))


def _retargeted(
    target: Mapping[str, Any], reached: float, ends: list[float], *, proved: bool
) -> dict[str, Any]:
    """The target with what all records reached together, and the verdict that follows."""
    enough = reached >= target["at_least"] if "at_least" in target else reached <= target["at_most"]
    missed = "missed" if proved else str(target["verdict"])
    verdict = "reached" if enough and proved else missed
    return {**target, "reached": reached, "ci95": ends, "verdict": verdict, "why": None}


def _median_of(rungs: Sequence[RungRecord]) -> RungRecord:
    """The last with the medians of all: tokens per second and peak memory."""
    speeds = [speed["median"] for rung in rungs if (speed := rung.get("tokens_per_s"))]
    peaks = [peak for rung in rungs if (peak := rung.get("peak_memory_bytes"))]
    found: Any = dict(rungs[-1])
    if found.get("tokens_per_s") and speeds:
        found["tokens_per_s"] = {**found["tokens_per_s"], "median": median(speeds)}
    return cast(RungRecord, {**found, "peak_memory_bytes": int(median(peaks)) if peaks else None})


def model_records(results: Path) -> list[tuple[Path, ModelRecord]]:
    paths = sorted(results.glob("*/models.json"))
    return [(path, _judged_again(_by_names_of_now(read_models(path)))) for path in paths]


REBUILT = "rebuilt from our model"


@cache
def _known() -> dict[str, Any]:
    known: dict[str, Any] = tomllib.loads(FILE.read_text(encoding="utf-8"))["workloads"]
    return known


def _is_former(work: WorkloadRecord) -> bool:
    """Whether the workload's baseline is now of another kind."""
    baseline = _known().get(work["name"], {}).get("baseline")
    return baseline is not None and work.get("rival_kind", baseline["kind"]) != baseline["kind"]


def _by_names_of_now(record: ModelRecord) -> ModelRecord:
    """Give a measured recipe its current name, by its techniques: recipes change, records do not."""
    known = _known()
    for work in record["workloads"]:
        if _is_former(work) and work["rival_kind"] == "recipe":
            work["rival"]["title"] += f", {REBUILT}"
        listed = load_workloads([work["name"]])[0].ours if work["name"] in known else ()
        names = {_identity(ours.recipe.techniques): ours.name for ours in listed}
        for ours in work.get("ours", ()):
            measured = _identity(tomllib.loads(ours["rung"]["recipe"]).get("techniques", []))
            ours["rung"]["name"] = names.get(measured, ours["rung"]["name"])
    return record


def _identity(techniques: Sequence[str | Mapping[str, Any]]) -> tuple[str, ...]:
    """Techniques with their knobs, in any order."""
    entries = ({"name": entry} if isinstance(entry, str) else entry for entry in techniques)
    return tuple(sorted(json.dumps(entry, sort_keys=True) for entry in entries))


def _judged_again(record: ModelRecord) -> ModelRecord:
    """With verdicts of equal that the current rule does not confirm marked as such."""
    for work in record["workloads"]:
        for ours in work.get("ours", ()):
            found = ours["rung"].get("parity") or {}
            if found.get("verdict") != "equal" or found.get("class") != Parity.STATISTICAL.name:
                continue
            norms = found["grad_norms"], found["reference_grad_norms"]
            perturbed = PerturbedRun(found["twin_losses"], norms[1]) if found.get("twin_losses") else None
            curves = found["losses"], found["reference_losses"], *norms
            judged = judge(Parity.STATISTICAL, "bfloat16", *curves, {}, perturbed)
            if judged.verdict != "equal":
                found["verdict"] = f"{judged.verdict}, judged again"
                ours["target"] |= {"verdict": "missed: it learns something else"}
    return record


def kernel_targets(ops: Sequence[tuple[Path, KernelOp]]) -> list[tuple[dict[str, Any], list[Path]]]:
    """The targets of one kernel: each with the medians of all records that have it, and where those are."""
    found = []
    every = [(path, _by_identity(op["targets"])) for path, op in ops]
    for identity, last in every[-1][1].items():
        same = [(path, targets[identity]) for path, targets in every if identity in targets]
        paths, values = (
            [path for path, _ in same],
            [t["reached"] for _, t in same if t["reached"] is not None],
        )
        if len(values) < 2:
            found.append((last, paths))
            continue
        ends = [target["ci95"] for _, target in same if target.get("ci95")]
        ratio = (
            pooled([Ratio(value, *end) for value, end in zip(values, ends, strict=True)]) if ends else None
        )
        reached = ratio.ratio if ratio else median(values)
        below = last["at_least"] is not None and reached < last["at_least"]
        above = last["at_most"] is not None and reached > last["at_most"]
        wrong = next((t["verdict"] for _, t in same if "equal" in (t.get("why") or "")), None)
        verdict = wrong or ("missed" if below or above else "reached")
        interval = [ratio.low, ratio.high] if ratio else None
        found.append(({**last, "reached": reached, "ci95": interval, "verdict": verdict, "why": None}, paths))
    return found


def _by_identity(targets: Sequence[dict[str, Any]]) -> dict[tuple[str, str, str, int], dict[str, Any]]:
    """Targets by size, pass and what is wanted, and the number of those before that have the same."""
    found: dict[tuple[str, str, str, int], dict[str, Any]] = {}
    for target in targets:
        number = 0
        while (identity := (target["size"], target["step"], target["what"], number)) in found:
            number += 1
        found[identity] = target
    return found


def title_of(workload: str, name: str) -> str:
    """A unique name of ours: its name, with the workload's if several have that name (`qlora`)."""
    return name if name.startswith(workload) else f"{workload}: {name}"


def machine_kind(machine: dict[str, object]) -> str:
    return f"{machine_name(machine)}, torch {machine.get('torch')}"
