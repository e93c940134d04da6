"""End to end: our recipes against common baselines, measured in one command.

Both sides get the same model shape, the same batch, the same text and our own loop. Their processes alternate (baseline, ours,
baseline, ours …), each fresh, so that a machine that gets hot affects both. The ratio has an interval; ours also have the
evidence of their techniques, a parity verdict against plain fp32, and a short life (`usable.py`): a ratio without them is not a
finding. A recipe that changes by design what is learned (adapters) is compared with the same method in fp32 without any
technique for speed: same adapters, same quantized base.

A library's random weights differ from ours, so the losses of the two sides are not compared here; tests at a small shape show
that both compute the same loss from the same weights. (nanoGPT's baseline starts from our weights.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rush.bench.longest import LongestSequence, life_took, took
from rush.bench.workloads import KINDS, TargetedRecipe, WorkloadSpec
from rush.files import timestamp
from rush.lab.ladder.findings import FORMULAS, Baselines, RungState, rung_of
from rush.lab.ladder.ladder_file import LadderPlan, SearchConfig
from rush.lab.paired import floors_of
from rush.lab.parity.judge import in_further_process, parity_with_plain
from rush.lab.trial.found import TrialFound
from rush.lab.trial.runner import TIMING, Bench, file_digests, open_bench
from rush.lab.trial.trial import Outcome
from rush.recipe_io import write_toml
from rush.records.ladder import RungRecord
from rush.records.life import broken
from rush.records.lock import FolderLock
from rush.records.models import (
    FILE,
    FORMAT,
    MemoryTarget,
    ModelRecord,
    SpeedTarget,
    WorkloadRecord,
    read_models,
    write_models,
)
from rush.techniques.api.own_files import package_digests
from rush.training.corpus import open_corpus
from rush.version import __version__

Watch = Callable[[str, str, int, int], None]
"""Called with the measured item, the current action, and how many of the items are done."""


def bench_models(
    workloads: Sequence[WorkloadSpec],
    folder: Path,
    *,
    extra_techniques: Sequence[Path] = (),
    watch: Watch = lambda *_: None,
    note: Callable[[str], None] = lambda text: None,
) -> ModelRecord:
    """Measure these workloads into `folder`, or resume the bench there. Writes and returns the record."""
    folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder):
        for workload in workloads:
            open_corpus(workload.any_recipe, None, note)  # prepared before the clock runs
        plan = _plan(workloads[0], workloads[0].ours[0])
        with open_bench(plan, folder, extra_techniques) as bench:
            record = _start(folder, bench)
            total = sum(_num_trials(workload) for workload in workloads)
            done = 0
            for workload in workloads:
                match = LongestSequence(workload, bench) if workload.longest else Match(workload, bench)
                for what in match.rounds():
                    watch(workload.name, what, done, total)
                    match.go()
                    done += 1
                    _put(record, match.record())
                    write_models(folder, record)
            record["finished"] = timestamp()
            write_models(folder, record)
        bench.clean()
    return record


class Match:
    """One workload: the baseline and our recipes taking turns."""

    def __init__(self, workload: WorkloadSpec, bench: Bench) -> None:
        assert workload.baseline is not None
        self.workload, self.spec = workload, workload.baseline
        self.baseline = RungState(None, "baseline", workload.baseline.title, workload.baseline.recipe)
        self.ours = [
            RungState(None, ours.name, ours.name, ours.recipe, over=self.baseline) for ours in workload.ours
        ]
        self.benches = {ours.name: replace(bench, plan=_plan(workload, ours)) for ours in workload.ours}
        self.bench = self.benches[workload.ours[0].name]
        self.references: dict[str, Outcome] = {}
        """The reference trials of our recipes, by name."""
        self._next: tuple[RungState, int] | None = None

    def rounds(self) -> Iterator[str]:
        """The next measurements, in order: in every round the baseline first, then each of ours."""
        for number in range(self.workload.measure.processes):
            for state in (self.baseline, *self.ours):
                if number and not state.measured:
                    continue  # it could not run the first time
                self._next = state, number
                yield f"{state.title} ({number + 1} of {self.workload.measure.processes})"

    def go(self) -> None:
        """Measure what `rounds` has just named."""
        assert self._next is not None
        state, number = self._next
        if state is self.baseline:
            state.outcomes.append(self._baseline_trial(number))
            return
        bench = self.benches[state.name]
        assert state.recipe is not None
        outcome = bench.run(state.recipe, f"time-{number}", first=number == 0)
        state.outcomes.append(outcome)
        if number and state.parity is not None:
            state.parity = in_further_process(state.parity, outcome, state.outcomes[0])
        if number == 0 and outcome.status == "ok":
            state.parity, made = parity_with_plain(bench, state.recipe, outcome, bench.plan.base)
            if made is not None:
                self.references[f"fp32 for {state.title}"] = made
            state.life = bench.life(state.recipe)

    def _baseline_trial(self, number: int) -> Outcome:
        baseline, bench = self.spec, self.bench
        spec: dict[str, Any] = {
            "kind": KINDS[baseline.kind].measure,
            "recipe": write_toml(baseline.recipe),
            "machine": bench.machine.to_dict(),
            "timing": self.workload.measure.model_dump(include=set(TIMING)),
            "profile": number == 0,
            "parity": [],
            "extra_techniques": list(bench.extra_techniques),
            "options": dict(baseline.options),
        }
        inputs: list[Any] = [spec, bench.machine.fingerprint(), __version__, number]
        inputs += [*file_digests(bench.extra_techniques), *package_digests(baseline.recipe)]
        path = bench.trial_path(inputs, f"baseline-{number}")
        known = bench.stored(path)
        return known or bench.execute(spec, path, self.workload.measure.limit_s, baseline.recipe)

    def record(self) -> WorkloadRecord:
        """Everything known so far."""
        states = [state for state in (self.baseline, *self.ours) if state.outcomes]
        floors = floors_of([state.timed for state in states], self.workload.measure.noise_floor)
        baselines = Baselines(self.bench.ceilings, self.bench.peaks, floors, self.workload.measure.smaller)
        recipe = self.spec.recipe
        found = self.baseline.outcomes[0].found if self.baseline.outcomes else TrialFound()
        return {
            "name": self.workload.name,
            "about": self.workload.about,
            "micro": recipe.micro,
            "sequence": recipe.batch.sequence,
            "rival_kind": self.spec.kind,
            "rival_versions": found.get("versions", {}),
            "rival_weights": found.get("weights"),
            "rival": (baseline := rung_of(self.baseline, self.baseline, baselines)),
            "ours": [
                {
                    "rung": rung,
                    "target": target_of(ours.at_least, rung, ours.memory_at_most, baseline),
                    "primary": ours.primary,
                }
                for ours, state in zip(self.workload.ours, self.ours, strict=True)
                if state.outcomes and (rung := rung_of(state, self.baseline, baselines))
            ],
            "took": [
                *(took(state.title, outcome) for state in states for outcome in state.outcomes),
                *(took(name, outcome) for name, outcome in self.references.items()),
                *(life_took(f"{state.title}, a short life", state.life) for state in states if state.life),
            ],
        }


CLOSE_CALL = "a close call: the interval reaches below the target"


def target_of(
    at_least: float, rung: RungRecord, memory_at_most: float | None = None, baseline: RungRecord | None = None
) -> SpeedTarget:
    """Reached only with the ratio, an equal parity verdict, every technique of the recipe seen at work, and a recipe that can be
    trained with."""
    target = _speed_target(at_least, rung)
    if memory_at_most is not None:
        target["memory"] = memory_target_of(memory_at_most, rung, baseline)
    return target


def _speed_target(at_least: float, rung: RungRecord) -> SpeedTarget:
    gain = rung.get("gain")
    if gain is None:
        why = rung.get("reason") or "there is nothing to compare with"
        return {"at_least": at_least, "reached": None, "ci95": None, "verdict": "not measured", "why": why}
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
    }


def memory_target_of(at_most: float, rung: RungRecord, baseline: RungRecord | None) -> MemoryTarget:
    """Peak memory over the baseline's; a small run that learns something else has saved nothing."""
    ours, theirs = rung.get("peak_memory_bytes"), baseline.get("peak_memory_bytes") if baseline else None
    if not ours or not theirs:
        who = "ours" if not ours else "the baseline"
        side = rung if not ours else baseline
        reason = (side.get("reason") if side else None) or "it was not measured"
        why = f"the memory of {who} is not known: {reason}"
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


def _unproved(rung: RungRecord) -> list[str]:
    """Why a figure is not a finding."""
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


def _num_trials(workload: WorkloadSpec) -> int:
    if workload.longest:
        return len(workload.longest.probes) + 1
    return workload.measure.processes * (1 + len(workload.ours))


def _plan(workload: WorkloadSpec, ours: TargetedRecipe) -> LadderPlan:
    """A ladder's plan with nothing to add: what the bench of trials needs to know."""
    return LadderPlan(workload.name, ours.recipe, (), workload.measure, ours.parity, SearchConfig())


def _start(folder: Path, bench: Bench) -> ModelRecord:
    """The record with what is there already: workloads measured into the same folder earlier stay."""
    before = read_models(folder) if (folder / FILE).exists() else None
    return {
        "format": FORMAT,
        "started": before["started"] if before else timestamp(),
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
