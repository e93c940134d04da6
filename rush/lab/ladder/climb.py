"""Measuring a ladder: one rung after another, in rounds, with the record written after every trial.

The first round goes rung by rung, because each rung's result decides what the next one builds on: later rungs
skip a technique that is unsupported, runs out of memory, crashes, or is unusable in its short life
(`usable.py`). Further rounds measure every rung again in a new process, in turn, so that a machine that
slowly gets hot or busy affects all rungs alike. A rung with a disturbed process is measured again, at most
`MOST_AGAIN` times. At the end the first rung is measured once more: its change is the drift.

Three views of the same techniques, because they interact: `cumulative` (each on top of those before),
`alone` (each on the base), `left_out` (each removed from the top).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rush.errors import RecipeError
from rush.files import timestamp
from rush.lab.ladder.findings import FORMULAS, Baselines, RungState, drift_of, rung_of
from rush.lab.ladder.ladder_file import Addition, LadderPlan, compose
from rush.lab.ladder.limits import batch_curve, sequence_limits, stops_paying, tries
from rush.lab.paired import floors_near, quotient
from rush.lab.parity.judge import in_further_process, parity_with_plain
from rush.lab.progress import Progress
from rush.lab.statistics import DISTURBED, Processes, disturbed, logs_of_medians
from rush.lab.trial.found import TimingFound
from rush.lab.trial.runner import Bench, open_bench
from rush.lab.trial.timing import timed
from rush.lab.trial.trial import Outcome
from rush.recipe_io import write_toml
from rush.records.ladder import FORMAT, LadderRecord, read_ladder, write_ladder
from rush.records.lock import FolderLock
from rush.training.corpus import open_corpus

MOST_AGAIN = 2
"""Maximum number of additional processes of a rung in place of a disturbed one. If that is not enough, the machine is busy."""


LadderProgress = Progress[LadderRecord]
Watch = Callable[[LadderProgress], None]


def climb(
    plan: LadderPlan,
    folder: Path,
    *,
    view: str = "cumulative",
    extra_techniques: Sequence[Path] = (),
    watch: Watch = lambda progress: None,
    note: Callable[[str], None] = lambda text: None,
) -> LadderRecord:
    """Measure a ladder into `folder`, or resume the one there. Returns its record.

    The view `all` measures the three in turn, `alone` and `left_out` in subfolders, and adds their
    interactions to the cumulative record.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder):
        _check_same(plan, folder, view)
        open_corpus(plan.base, None, note)
        with open_bench(plan, folder, extra_techniques) as bench:
            record = _views(bench, view, watch)
        bench.clean()
    return record


def _views(bench: Bench, view: str, watch: Watch) -> LadderRecord:
    from rush.lab.ladder.interactions import interactions

    if view != "all":
        return Climb(bench, view, bench.folder, watch).go()
    records = {}
    for name in ("cumulative", "alone", "left_out"):
        into = bench.folder if name == "cumulative" else bench.folder / name
        into.mkdir(exist_ok=True)
        records[name] = Climb(bench, name, into, watch).go()
    whole = records["cumulative"]
    whole["interactions"] = interactions(whole, records["alone"], records["left_out"])
    write_ladder(bench.folder / "ladder.json", whole)
    return whole


def _check_same(plan: LadderPlan, folder: Path, view: str) -> None:
    """A folder holds one ladder; resuming it must mean the same one."""
    if not (folder / "ladder.json").exists():
        return
    there = read_ladder(folder)
    wanted, base = "cumulative" if view == "all" else view, str(there["base"].get("digest"))
    if (there["name"], base, there["view"]) != (plan.name, plan.base.digest, wanted):
        raise RecipeError(
            f"{folder} holds another ladder ({there['name']}, {there['view']}, base {base[:12]}); choose another --out."
        )


class Climb:
    """One view of a ladder being measured."""

    def __init__(self, bench: Bench, view: str, into: Path, watch: Watch) -> None:
        self.bench, self.plan, self.view, self.watch = bench, bench.plan, view, watch
        self.file = into / "ladder.json"
        self.states: list[RungState] = []
        self.again: list[Outcome] = []
        before = read_ladder(self.file) if self.file.exists() else None
        self.started = before["started"] if before else timestamp()
        self.interactions = before["interactions"] if before else None
        self.judged = {rung["digest"]: rung["parity"] for rung in before["rungs"]} if before else {}
        self.num_rungs = len(self.plan.additions) + 1
        self.done = 0
        self.finished: str | None = None
        self.top: list[Addition] = []
        self.curve: list[dict[str, Any]] | None = None
        self.limits: list[dict[str, Any]] | None = None

    @property
    def base(self) -> RungState:
        return self.states[0]

    @property
    def first(self) -> RungState:
        """The lowest rung that could be measured: the reference of drift and of the cumulative gain."""
        return next((state for state in self.states if state.measured), self.base)

    def go(self) -> LadderRecord:
        additions = self.plan.additions if self.view != "left_out" else self._kept_by_climbing()
        self.num_rungs = len(additions) + 1
        for state in self._rise(additions):
            if state.recipe is not None:
                self._trial(state, 0)
        for number in range(1, self.plan.measure.processes):
            for state in worth_repeating(self.states, self.plan.measure.clear):
                self._trial(state, number)
        for state in self.states:
            self._replace_disturbed(state)
        if self.first.measured:
            assert self.first.recipe is not None
            self._report(f"{self.first.name} again")
            self.again = [self.bench.run(self.first.recipe, "again-0")]
            self.done += 1
        if self.view == "cumulative":
            self._search()
        self.finished = timestamp()
        return self._report(None)

    def _rise(self, additions: Sequence[Addition]) -> Iterator[RungState]:
        """The rungs in order, each after the first trial of the one before."""
        top = list(additions) if self.view == "left_out" else []
        words = "all" if self.view == "left_out" else "base"
        yield self._state(None, words, top, None)
        last = self.base
        for addition in additions:
            if self.view == "left_out":
                rest = [other for other in additions if other is not addition]
                yield self._state(addition, f"without {addition.name}", rest, self.base)
                continue
            below = self.top if self.view == "cumulative" else []
            state = self._state(addition, addition.name, [*below, addition], last)
            yield state
            if self.view != "cumulative":
                continue
            usable = state.status == "ok" and not state.unusable
            state.kept = usable and builds_on(addition, state, last)
            if state.kept:
                self.top = [*(part for part in self.top if not addition.supersedes(part)), addition]
                last = state

    def _state(
        self, addition: Addition | None, name: str, parts: Sequence[Addition], over: RungState | None
    ) -> RungState:
        title = name if addition is None or self.view == "left_out" else addition.title
        try:
            recipe, refused = compose(self.plan.base, parts), None
        except RecipeError as error:
            recipe, refused = None, str(error)
        state = RungState(addition, name, title, recipe, refused=refused, over=over)
        self.states.append(state)
        return state

    def _trial(self, state: RungState, number: int) -> None:
        assert state.recipe is not None
        if self.bench.known(state.recipe, f"time-{number}") is None:
            self._report(state.name)
        self._run(state, number)
        if number == 0 and state.status == "ok" and not self.bench.lived(state.recipe):
            self._report(f"a life of {state.name}")
        self._live(state)
        self.done += 1
        self._report(state.name)

    def _replace_disturbed(self, state: RungState) -> None:
        """Further processes of a rung in place of a disturbed one. What was stored decides, so a resumed ladder does the same."""
        while state.num_again < MOST_AGAIN and needs_another(state.processes, self.plan.measure.processes):
            state.num_again += 1
            self._trial(state, len(state.outcomes))

    def _run(self, state: RungState, number: int) -> None:
        """One more process of a rung; the first one also judges its parity."""
        assert state.recipe is not None
        earlier = self.bench.known(state.recipe, f"time-{number}") is not None
        outcome = self.bench.run(state.recipe, f"time-{number}", first=number == 0)
        state.outcomes.append(outcome)
        if number and state.parity is not None:
            state.parity = in_further_process(state.parity, outcome, state.outcomes[0])
        if number == 0 and state.status in ("ok", "no_effect"):
            if earlier and self.judged.get(state.recipe.digest):
                # The gradients may be gone: a folder may be copied without them.
                state.parity = self.judged[state.recipe.digest]
                state.idle = _same_run(state)
                return
            # A plain base that fits is its own reference.
            state.parity, _ = parity_with_plain(self.bench, state.recipe, outcome, self.plan.base)
            state.idle = _same_run(state)

    def _live(self, state: RungState) -> None:
        """The life of a rung whose first trial succeeded, once."""
        if state.life is None and state.status == "ok":
            assert state.recipe is not None
            state.life = self.bench.life(state.recipe)

    def _search(self) -> None:
        """At the top: the batch that pays, and how long a sequence may be."""
        search, memory = self.plan.search, self.bench.machine.memory_bytes
        if search.batch_up_to is not None:
            self._report("batch sizes")
            attempt = tries(self.bench, self.plan.base, self.top, "batch.micro")
            self.curve = batch_curve(
                attempt, search.batch_up_to, memory, first=search.batch_from, neighbours=search.neighbours
            )
        if search.sequence_up_to is not None:
            self._report("sequence lengths")
            self.limits = sequence_limits(self.bench, self.plan, self.top, memory)

    def _kept_by_climbing(self) -> list[Addition]:
        """What can be left out: what is at the top, by the first round of the cumulative view."""
        below = Climb(self.bench, "cumulative", self.file.parent, self.watch)
        for state in below._rise(self.plan.additions):
            if state.recipe is not None:
                below._run(state, 0)
                below._live(state)
        return below.top

    def _report(self, doing: str | None) -> LadderRecord:
        """Write the record and report progress."""
        record = self.record()
        write_ladder(self.file, record)
        measured = sum(state.measured or not state.outcomes for state in self.states)
        measured += self.num_rungs - len(self.states)
        failed = sum(bool(state.outcomes) and not state.measured for state in self.states)
        total = measured * self.plan.measure.processes + failed + 1
        total += sum(state.num_again for state in self.states)
        seconds = self.bench.seconds
        left = statistics.fmean(seconds) * (total - self.done) if seconds else None
        lives = [sum(part["seconds"] for part in state.life["parts"]) for state in self.states if state.life]
        if left is not None and lives:
            left += statistics.fmean(lives) * (self.num_rungs - len(self.states))
        self.watch(LadderProgress(record, doing, self.done, total, left))
        return record

    def record(self) -> LadderRecord:
        """The record of everything measured so far."""
        tried = [state for state in self.states if state.outcomes or state.refused]
        again = [timed(timing) for timing in self._again_timings()]
        families = [state.timed + (again if state is self.first else []) for state in tried]
        floors = floors_near(families, self.plan.measure.noise_floor)
        measure, held_against = self.plan.measure, (self.bench.ceilings, self.bench.peaks)
        drift = None
        if again:
            drift = drift_of(self.first.timed, again, floors[tried.index(self.first)])
        return {
            "format": FORMAT,
            "name": self.plan.name,
            "view": self.view,
            "started": self.started,
            "finished": self.finished,
            "trials_s": self._trials_s(),
            "machine": self.bench.machine.to_dict(),
            "ceilings": self.bench.ceilings,
            "peaks": self.bench.peaks,
            "base": {"recipe": write_toml(self.plan.base), "digest": self.plan.base.digest},
            "formulas": FORMULAS,
            "claim": dict(self.plan.claim) if self.plan.claim and self.view == "cumulative" else None,
            "rungs": [
                rung_of(state, self.first, Baselines(*held_against, there, measure.smaller))
                for state, there in zip(tried, floors, strict=True)
            ],
            "counted": next(
                (str(t.get("counted", "processed")) for s in tried for t in s.timings), "processed"
            ),
            "drift": drift,
            "batch_curve": self.curve,
            "batch_stops_paying_at": stops_paying(self.curve) if self.curve else None,
            "sequence_limits": self.limits,
            "interactions": self.interactions,
        }

    def _trials_s(self) -> float:
        """The total time of all trials and lives of the rungs, over all sessions."""
        outcomes = [outcome for state in self.states for outcome in state.outcomes] + self.again
        lives = [part["seconds"] for state in self.states if state.life for part in state.life["parts"]]
        return sum(outcome.wall_s for outcome in outcomes) + sum(lives)

    def _again_timings(self) -> list[TimingFound]:
        return [o.found["timing"] for o in self.again if o.status == "ok" and "timing" in o.found]


def needs_another(processes: Processes, planned: int) -> bool:
    """Whether one of the processes of a rung seems disturbed and has not been replaced yet.

    Between two processes that far apart it is unknown which one was disturbed: a third decides.
    """
    logs = logs_of_medians(processes)
    if len(logs) == 2:
        return abs(float(logs[0] - logs[1])) > -math.log1p(-DISTURBED)
    return disturbed(logs) is not None and len(logs) - 1 < planned


def worth_repeating(states: Sequence[RungState], clear: float | None) -> list[RungState]:
    """The rungs worth another process: those near the one they are compared with, and that one."""
    measured = [state for state in states if state.measured]
    if clear is None:
        return measured
    near = {id(measured[0])} if measured else set()
    for state in measured:
        over = state.over
        if over is not None and over.measured:
            # By the first process, so that a resumed ladder decides the same.
            ratio = quotient(over.timed[:1], state.timed[:1])
            if max(ratio, 1 / ratio) <= 1 + clear:
                near |= {id(state), id(over)}
    return [state for state in measured if id(state) in near]


def _same_run(state: RungState) -> str | None:
    """Why a technique had no effect: the same operators, settings and bits as without it. None if anything differs."""
    over = state.over
    if not state.added or over is None or not over.outcomes:
        return None
    ours, theirs = (each.outcomes[0].found for each in (state, over))
    losses = [found.get("timing", {}).get("steps", {}).get("losses", []) for found in (ours, theirs)]
    made = min(map(len, losses))
    same = ours.get("seen") is not None and ours.get("seen") == theirs.get("seen")
    if not (same and made and losses[0][:made] == losses[1][:made]):
        return None
    return f"evidence without effect: operators, settings and losses are those of {over.name}, bit for bit"


def builds_on(addition: Addition, state: RungState, last: RungState) -> bool:
    """Whether the rungs above build on this one; the first process of each decides which is faster."""
    if addition.keep != "faster":
        return addition.keep
    if state.parity is not None and state.parity["verdict"] == "different":
        return False
    return not last.measured or quotient(last.timed[:1], state.timed[:1]) > 1
