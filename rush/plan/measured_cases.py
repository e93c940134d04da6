"""Measured cases to compare plans with: ladders, benches, searches and runs under a results folder."""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rush.errors import RushError
from rush.files import parse_json
from rush.hardware.catalog import find
from rush.hardware.machine import Machine
from rush.plan.spec import Spec, spec_of
from rush.plan.target import TargetMachine, target_here, target_of, with_memory_limit
from rush.recipe import Recipe
from rush.recipe_io import CONSTANT_BATCH, changed, parse
from rush.records.ladder import LADDER, read_ladder
from rush.records.metrics import MetricsRow, read_rows
from rush.records.models import MODELS
from rush.records.tune import TUNE
from rush.records.typed import RecordFile, fitting


@dataclass(frozen=True)
class MeasuredCase:
    """One measured recipe on one machine."""

    name: str
    recipe: Recipe
    spec: Spec
    target: TargetMachine
    step_s: float
    memory_bytes: float | None
    """Peak of allocated memory; None where it was not recorded."""
    breakdown_s: Mapping[str, float] = field(default_factory=dict)
    study: str = ""
    """Folder of its record under the results."""

    @property
    def digest(self) -> str:
        return self.recipe.digest

    @property
    def waits(self) -> bool:
        """Whether its profile shows an idle device for much of the step: bound by the host."""
        return self.breakdown_s.get("idle", 0.0) > 0.15 * self.step_s


def read_findings(folder: Path) -> list[MeasuredCase]:
    """Every distinct recipe that was measured, in ladders, benches, searches and runs; the better record of one measured twice."""
    found: dict[str, MeasuredCase] = {}
    records = [(path, read_ladder(path)) for path in sorted(folder.glob("**/ladder*.json"))]
    with fitting(str(folder), "ladder", "rush ladder"):
        records.sort(key=lambda item: _worth(item[1]), reverse=True)
    for path, record in records:
        with LADDER.using(path):
            for case in _ladder(record, path.parent.relative_to(folder).as_posix()):
                found.setdefault(case.digest, case)
    kinds: tuple[tuple[RecordFile[Any], Callable[[Any, str], Iterable[MeasuredCase]]], ...] = (
        (MODELS, _beside_baselines),
        (TUNE, _searched),
    )
    for kind, cases in kinds:
        read = [(path, kind.read(path)) for path in folder.glob(f"*/{kind.file}")]
        for path, one in sorted(read, key=lambda item: str(item[1]["started"]), reverse=True):
            with kind.using(path):
                for case in cases(one, path.parent.name):
                    found.setdefault(case.digest, case)
    for path in sorted(folder.glob("*/metrics.jsonl")):
        with fitting(str(path.parent), "run", "rush train"):
            for case in _run(path.parent):
                found.setdefault(case.digest, case)
    return list(found.values())


@dataclass(frozen=True)
class Overflow:
    """One recipe that ran out of memory."""

    name: str
    spec: Spec
    target: TargetMachine
    study: str


def read_overflows(folder: Path) -> list[Overflow]:
    """Every distinct recipe that ran out of memory on a GPU: no plan may fit."""
    found: dict[str, Overflow] = {}
    for path in sorted(folder.glob("**/ladder*.json")):
        ladder, study = read_ladder(path), path.parent.relative_to(folder).as_posix()
        with LADDER.using(path):
            for rung in ladder["rungs"] if ladder.get("ceilings") else ():
                if rung["status"] == "out_of_memory" and (recipe := _recipe(rung["recipe"])) is not None:
                    found.setdefault(recipe.digest, _overflow(rung["name"], recipe, ladder, study))
    for path in sorted(folder.glob("*/models.json")):
        bench = MODELS.read(path)
        with MODELS.using(path):
            for workload in bench["workloads"] if bench.get("ceilings") else ():
                for point, recipe in _lengths(workload):
                    if point["status"] == "out_of_memory":
                        name = f"{workload['name']}, {point['sequence']:,} tokens"
                        found.setdefault(recipe.digest, _overflow(name, recipe, bench, path.parent.name))
    return [one for one in found.values() if one.target.kind == "cuda"]


def _overflow(name: str, recipe: Recipe, record: Any, study: str) -> Overflow:
    machine = Machine.from_dict(record["machine"])
    target = with_memory_limit(target_here(machine, record["ceilings"]), recipe.run.memory_limit_gb)
    return Overflow(name, spec_of(recipe, machine.device), target, study)


def _lengths(workload: Any) -> Iterator[tuple[Any, Recipe]]:
    """Every sequence length that `rush bench models` tried, with its recipe."""
    longest = workload.get("longest")
    recipe = _recipe(longest["recipe"]) if longest else None
    if longest is None or recipe is None:
        return
    for point in longest["tried"]:
        context = max(point["sequence"], recipe.shape().context)
        yield point, changed(recipe, {"batch.sequence": point["sequence"], "model.shape.context": context})


def _worth(record: Any) -> tuple[bool, int, str]:
    """Finished ladders first, then those with more processes per rung, then later ones."""
    timed = [rung["step_ms"] for rung in record["rungs"] if isinstance(rung.get("step_ms"), dict)]
    processes = max((len(measured.get("processes") or ()) for measured in timed), default=0)
    return record.get("finished") is not None, processes, record["started"]


def _ladder(record: Any, study: str) -> Iterator[MeasuredCase]:
    if not record.get("ceilings"):
        return
    machine = Machine.from_dict(record["machine"])
    target = target_here(machine, record["ceilings"])
    top: Recipe | None = None
    for rung in record["rungs"]:
        if (case := _rung(rung, machine, target, study)) is not None:
            top = case.recipe if rung.get("kept") is not False else top
            yield case
    for point in record.get("batch_curve") or ():
        if top is None or point["status"] != "ok":
            continue
        recipe = changed(top, {"batch.micro": point["micro"]})
        seconds = spec_of(recipe, machine.device).step_tokens / point["tokens_per_s"]["median"]
        name = f"batch {point['micro']} of the curve"
        yield _case(name, recipe, machine, target, seconds, point.get("peak_memory_bytes"), study)


def _rung(rung: Any, machine: Machine, target: TargetMachine, study: str) -> MeasuredCase | None:
    recipe = _recipe(rung["recipe"])
    if rung["status"] != "ok" or recipe is None or not rung.get("step_ms"):
        return None
    seconds = _full_step_s(rung, spec_of(recipe, machine.device).step_tokens)
    case = _case(rung["name"], recipe, machine, target, seconds, rung.get("peak_memory_bytes"), study)
    return replace(
        case, breakdown_s={part: ms / 1e3 for part, ms in (rung.get("breakdown_ms") or {}).items()}
    )


def _full_step_s(rung: Any, step_tokens: float) -> float:
    """Time of a step of full rows, as a plan assumes; with dynamic padding measured rows are shorter."""
    processed = (rung.get("tokens_kind") or {}).get("processed")
    return float(step_tokens / processed if processed else rung["step_ms"]["median"] / 1e3)


def _beside_baselines(record: Any, study: str) -> Iterator[MeasuredCase]:
    """Our recipes of `rush bench models`, and baselines that are recipes; models of other libraries cannot be planned."""
    if not record.get("ceilings"):
        return
    machine = Machine.from_dict(record["machine"])
    target = target_here(machine, record["ceilings"])
    for workload in record["workloads"]:
        for point, recipe in _lengths(workload):
            if point["status"] == "ok":
                name = f"{workload['name']}, {point['sequence']:,} tokens"
                yield _case(name, recipe, machine, target, point["step_s"], point["peak_memory_bytes"], study)
        rungs = [ours["rung"] for ours in workload.get("ours", ())]
        if workload.get("rival_kind") == "recipe":
            rungs.append({**workload["rival"], "name": f"rival of {workload['name']}"})
        for rung in rungs:
            if (case := _rung(rung, machine, target, study)) is not None:
                yield case


def _searched(record: Any, study: str) -> Iterator[MeasuredCase]:
    """What a search timed, with its shortened steps."""
    machine, tokens = Machine.from_dict(record["machine"]), record["settings"]["tokens"]
    sheet = find(machine.devices[0]) if machine.devices else None
    if record.get("ceilings"):
        target = target_here(machine, record["ceilings"])
    elif sheet is not None:
        target = target_of(sheet.key)
    else:
        return
    every = record.get("counted", "processed") == "processed"
    for row in record["candidates"]:
        rate = row.get("processed_per_s") if not every else (row["tokens_per_s"] or {}).get("median")
        recipe = _recipe(row["recipe"]) if rate else None
        if not rate or recipe is None:
            continue
        recipe = changed(recipe, {"batch.total_tokens": tokens, **CONSTANT_BATCH})
        seconds = spec_of(recipe, machine.device).step_tokens / rate
        name = row["key"] if len(row["key"]) <= 40 else f"{row['key'][:39]}…"
        yield _case(name, recipe, machine, target, seconds, row["peak_memory_bytes"], study)


def _case(
    name: str,
    recipe: Recipe,
    machine: Machine,
    target: TargetMachine,
    step_s: float,
    memory_bytes: float | None,
    study: str,
) -> MeasuredCase:
    """A case without memory on a CPU, where the resident process was recorded, and with CUDA graphs, whose pool was not counted."""
    spec = spec_of(recipe, machine.device)
    known = machine.device == "cuda" and not spec.effects.factor("cuda_graph.pool")
    return MeasuredCase(name, recipe, spec, target, step_s, memory_bytes if known else None, study=study)


def _run(folder: Path) -> Iterator[MeasuredCase]:
    machine = Machine.from_dict(parse_json((folder / "machine.json").read_bytes()))
    recipe = _recipe((folder / "recipe.toml").read_text())
    sheet = find(machine.devices[0])
    if recipe is None or sheet is None:
        return
    rows = list(read_rows(folder / "metrics.jsonl", MetricsRow))
    seconds = statistics.median(row["step_s"] for row in rows[5:] if "val_loss" not in row)
    yield _case("the run", recipe, machine, target_of(sheet.key), seconds, None, folder.name)


def _recipe(text: str) -> Recipe | None:
    """None for a recipe of an older, unsupported format."""
    try:
        return parse(tomllib.loads(text))
    except RushError:
        return None
