"""End to end: our recipes beside the rivals people use, measured in one command.

Both sides get the same model shape, the same batch, the same text and our own loop. Their processes
alternate (rival, ours, rival, ours …), each fresh, so that a machine that grows hot does so under both. The
ratio carries an interval; ours also carry the evidence of their techniques and a parity verdict against
plain fp32, and a short life (`usable.py`): a ratio without them is not a finding. A recipe that learns something else by design (adapters) is held
against the same method in fp32 without anything that is there for speed: same adapters, same quantized base.

The rival's weights are as random as ours but not the same ones, so the losses of the two sides are not compared here; that
both compute the same loss from the same weights is for the tests to show, at a small shape.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rush.bench.longest import Length, life_took, took
from rush.bench.workloads import Ours, Workload
from rush.files import write_json_atomic
from rush.lab.ladder.findings import FORMULAS, Stand, Yard, rung_of
from rush.lab.ladder.ladder_file import Plan, Search
from rush.lab.paired import floors_of
from rush.lab.parity.judge import hold_against_plain
from rush.lab.trial.runner import TIMING, Bench, open_bench
from rush.lab.trial.trial import Outcome, execute
from rush.recipe_io import write_toml
from rush.records.ladder import Rung
from rush.records.life import broken
from rush.records.lock import FolderLock
from rush.records.models import (
    FILE,
    FORMAT,
    MemoryTarget,
    ModelRecord,
    Target,
    read_models,
    write_models,
)
from rush.records.models import Workload as WorkloadRecord
from rush.train.corpus import open_corpus
from rush.version import __version__


@dataclass(frozen=True)
class Progress:
    workload: str
    doing: str
    done: int
    total: int


Watch = Callable[[Progress], None]


def bench_models(
    workloads: Sequence[Workload],
    folder: Path,
    *,
    watch: Watch = lambda progress: None,
    note: Callable[[str], None] = lambda text: None,
) -> ModelRecord:
    """Measure these workloads into `folder`, or go on with what is there. Returns the record, which is written too."""
    folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder):
        for workload in workloads:
            open_corpus(workload.any_recipe, None, note)  # prepared before the clock runs
        plan = _plan(workloads[0], workloads[0].ours[0])
        with open_bench(plan, folder) as bench:
            record = _start(folder, bench)
            total = sum(_num_trials(workload) for workload in workloads)
            done = 0
            for workload in workloads:
                match = Length(workload, bench) if workload.longest else Match(workload, bench)
                for what in match.rounds():
                    watch(Progress(workload.name, what, done, total))
                    match.go()
                    done += 1
                    _put(record, match.record())
                    write_models(folder, record)
            record["finished"] = _now()
            write_models(folder, record)
        bench.clean()
    return record


class Match:
    """One workload: the rival and our recipes taking turns."""

    def __init__(self, workload: Workload, bench: Bench) -> None:
        assert workload.rival is not None
        self.workload, self.opponent = workload, workload.rival
        self.rival = Stand(None, "rival", workload.rival.title, workload.rival.recipe)
        self.ours = [
            Stand(None, ours.name, ours.name, ours.recipe, over=self.rival) for ours in workload.ours
        ]
        self.benches = {ours.name: replace(bench, plan=_plan(workload, ours)) for ours in workload.ours}
        self.bench = self.benches[workload.ours[0].name]
        self.references: dict[str, Outcome] = {}
        """The trials that ours are held against, by name."""
        self._next: tuple[Stand, int] | None = None

    def rounds(self) -> Iterator[str]:
        """What is measured next, in order: in every round the rival first, then each of ours."""
        for number in range(self.workload.measure.processes):
            for stand in (self.rival, *self.ours):
                if number and not stand.measured:
                    continue  # it could not run the first time
                self._next = stand, number
                yield f"{stand.title} ({number + 1} of {self.workload.measure.processes})"

    def go(self) -> None:
        """Measure what `rounds` has just named."""
        assert self._next is not None
        stand, number = self._next
        if stand is self.rival:
            stand.outcomes.append(self._rival_trial(number))
            return
        bench = self.benches[stand.name]
        assert stand.recipe is not None
        outcome = bench.run(stand.recipe, f"time-{number}", first=number == 0)
        stand.outcomes.append(outcome)
        if number == 0 and outcome.status == "ok":
            stand.parity, made = hold_against_plain(bench, stand.recipe, outcome, bench.plan.base)
            if made is not None:
                self.references[f"fp32 for {stand.title}"] = made
            stand.life = bench.life(stand.recipe)

    def _rival_trial(self, number: int) -> Outcome:
        rival, bench = self.opponent, self.bench
        spec: dict[str, Any] = {
            "kind": "measure" if rival.kind == "recipe" else "rush.bench.baseline_run:measure_rival",
            "recipe": write_toml(rival.recipe),
            "machine": bench.machine.to_dict(),
            "timing": self.workload.measure.model_dump(include=set(TIMING)),
            "profile": number == 0,
            "parity": [],
            "extra_techniques": [],
            "options": dict(rival.options),
        }
        told = json.dumps([spec, bench.machine.fingerprint(), __version__, number], sort_keys=True)
        digest = hashlib.sha256(told.encode()).hexdigest()[:16]
        path = bench.folder / "trials" / f"{digest}-rival-{number}.json"
        if path.exists():
            return Outcome.from_dict(json.loads(path.read_text()))
        compiled = (bench.work / f"compiled-{rival.recipe.digest[:16]}").resolve()
        outcome = execute(
            bench.starter, spec, bench.work / path.stem, self.workload.measure.limit_s, compiled
        )
        path.parent.mkdir(exist_ok=True)
        write_json_atomic(path, outcome.to_dict())
        return outcome

    def record(self) -> WorkloadRecord:
        """Everything known so far."""
        stands = [stand for stand in (self.rival, *self.ours) if stand.outcomes]
        floors = floors_of([stand.timed for stand in stands], self.workload.measure.noise_floor)
        yard = Yard(self.bench.ceilings, self.bench.peaks, floors, self.workload.measure.smaller)
        recipe = self.opponent.recipe
        found = dict(self.rival.outcomes[0].found) if self.rival.outcomes else {}
        return {
            "name": self.workload.name,
            "about": self.workload.about,
            "micro": recipe.micro,
            "sequence": recipe.batch.sequence,
            "rival_kind": self.opponent.kind,
            "rival_versions": found.get("versions", {}),
            "rival_weights": found.get("weights"),
            "rival": (rival := rung_of(self.rival, self.rival, yard)),
            "ours": [
                {
                    "rung": rung,
                    "target": target_of(ours.at_least, rung, ours.memory_at_most, rival),
                    "primary": ours.primary,
                }
                for ours, stand in zip(self.workload.ours, self.ours, strict=True)
                if stand.outcomes and (rung := rung_of(stand, self.rival, yard))
            ],
            "took": [
                *(took(stand.title, outcome) for stand in stands for outcome in stand.outcomes),
                *(took(name, outcome) for name, outcome in self.references.items()),
                *(life_took(f"{stand.title}, a short life", stand.life) for stand in stands if stand.life),
            ],
        }


CLOSE_CALL = "a close call: the interval reaches below the target"


def target_of(
    at_least: float, rung: Rung, memory_at_most: float | None = None, rival: Rung | None = None
) -> Target:
    """Reached only with the ratio, an equal parity verdict, every technique of the recipe seen at work, and a recipe that can be
    trained with."""
    gain = rung.get("gain")
    memory: Target = {}
    if memory_at_most is not None:
        memory = {"memory": memory_target_of(memory_at_most, rung, rival or {})}
    if gain is None:
        why = rung.get("reason") or "there is nothing to compare with"
        return {
            "at_least": at_least,
            "reached": None,
            "ci95": None,
            "verdict": "not measured",
            "why": why,
            **memory,
        }
    problems = _unproved(rung)
    if gain["ratio"] < at_least:
        problems.insert(0, f"{gain['ratio']:.3f}× is less than {at_least:g}×")
    close = gain["ci95"][0] < at_least <= gain["ratio"]
    return {
        "at_least": at_least,
        "reached": gain["ratio"],
        "ci95": gain["ci95"],
        "verdict": "missed" if problems else "reached",
        "why": "; ".join([*problems, *([CLOSE_CALL] if close else [])]) or None,
        **memory,
    }


def memory_target_of(at_most: float, rung: Rung, rival: Rung) -> MemoryTarget:
    """Peak memory over the rival's; a small run that learns something else has saved nothing."""
    ours, theirs = rung.get("peak_memory_bytes"), rival.get("peak_memory_bytes")
    if not ours or not theirs:
        who = "ours" if not ours else "the rival"
        why = f"the memory of {who} is not known: {(rung if not ours else rival).get('reason') or 'it was not measured'}"
        return {"at_most": at_most, "reached": None, "verdict": "not measured", "why": why}
    ratio, problems = ours / theirs, _unproved(rung)
    if ratio > at_most:
        problems.insert(0, f"{ratio:.3f}× is more than {at_most:g}×")
    return {
        "at_most": at_most,
        "reached": ratio,
        "verdict": "missed" if problems else "reached",
        "why": "; ".join(problems) or None,
    }


def _unproved(rung: Rung) -> list[str]:
    """What keeps a figure from being a finding."""
    parity, problems = rung.get("parity") or {}, []
    if parity.get("verdict") != "equal":
        why = parity.get("why", "no trace was made")
        problems.append(f"parity is {parity.get('verdict', 'not judged')}: {why}")
    if idle := [entry["technique"] for entry in rung["evidence"] if not entry["took_effect"]]:
        problems.append(f"no trace of {', '.join(idle)} in the profile")
    if broken(life := rung.get("life")):
        assert life is not None
        problems.append(str(life["problem"]).rstrip("."))
    return problems


def _num_trials(workload: Workload) -> int:
    if workload.longest:
        return len(workload.longest.probes) + 1
    return workload.measure.processes * (1 + len(workload.ours))


def _plan(workload: Workload, ours: Ours) -> Plan:
    """A ladder's plan with nothing to add: what the bench of trials needs to know."""
    return Plan(workload.name, ours.recipe, (), workload.measure, ours.parity, Search())


def _start(folder: Path, bench: Bench) -> ModelRecord:
    """The record with what is there already: workloads measured into the same folder earlier stay."""
    before = read_models(folder) if (folder / FILE).exists() else None
    return {
        "format": FORMAT,
        "started": before["started"] if before else _now(),
        "finished": None,
        "machine": bench.machine.to_dict(),
        "ceilings": bench.ceilings,
        "peaks": bench.peaks,
        "formulas": FORMULAS,
        "workloads": before["workloads"] if before and before["machine"] == bench.machine.to_dict() else [],
    }


def _put(record: ModelRecord, workload: WorkloadRecord) -> None:
    names = [there["name"] for there in record["workloads"]]
    if workload["name"] in names:
        record["workloads"][names.index(workload["name"])] = workload
    else:
        record["workloads"].append(workload)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
