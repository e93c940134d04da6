"""The search: prune by prediction, rank by short trials, decide by longer ones, prove the winner.

It starts with the unchanged recipe and jumps ahead to the planner's best; if the planner is right, one trial makes most of the
gain. From there it climbs: the most promising single move first, each compared with the lead, which is replaced when a move is
ahead by more than the noise. A technique that promises no more than the same loss curve is proved before others build on it;
it and every jump must also pass a short life. When time or moves run out, `finals.py` decides.

Nothing here touches a device or a file: `Laboratory` runs the trials, and a test can answer from a table.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Protocol

from rush.errors import MachineError
from rush.lab.statistics import Ratio
from rush.recipe import Recipe
from rush.records.life import LifeRecord, broken
from rush.records.tune import PLANNED
from rush.techniques import Parity
from rush.tune.budget import Budget
from rush.tune.candidates import Candidate, Event
from rush.tune.forecast import Prediction
from rush.tune.goal import Goal, TrialLimit, TuneResult
from rush.tune.moves import (
    Move,
    MoveKind,
    Rules,
    compiled,
    describe,
    identity,
    is_subset,
    parity_techniques,
    with_micro,
    with_other_micro,
    without,
)
from rush.tune.options import MoveOption, MoveOptions, TrialTurn
from rush.tune.outlook import Outlook, jumps

CLEAR = 1.05
"""A smaller gain is confirmed in a second process."""
ENOUGH = 0.99
"""The least expected ratio of a jump over the lead of an earlier jump."""
SIMPLER = 0.995
"""The least ratio of a recipe over a lead with more techniques: those that gain nothing are removed."""
PATIENCE = 3.0
"""A trial that takes this many times longer than expected is ended: it has lost."""
LEAST_S = 20.0


class Laboratory(Protocol):
    """Runs trials; finished ones are read from disk."""

    def reference(self, limit_s: float) -> TuneResult:
        """Plain fp32, traced for parity."""
        ...

    def trial(self, kind: str, recipe: Recipe, limit: TrialLimit) -> TuneResult:
        """`rank`: a short timing, `confirm`: again. `decide`: a longer one. `prove`: with evidence and parity. `length`: does it fit?"""
        ...

    def life(self, recipe: Recipe, limit_s: float) -> LifeRecord:
        """A short life: a few steps with validation, sample, checkpoint and resume."""
        ...


def blamed(life: LifeRecord | None) -> frozenset[str]:
    """The techniques to blame for a broken life."""
    return frozenset(life.get("techniques", ()) if life else ())


@dataclass(frozen=True)
class Doing:
    """The trial that is running; as text it is a line of progress."""

    candidate: str
    kind: str
    known: bool = False
    """Whether its result is known from an earlier, interrupted search."""

    def __str__(self) -> str:
        return self.called(self.candidate)

    def called(self, name: str) -> str:
        """The same text with another name of the candidate."""
        special = {"rank": name, "reference": f"{name}, for parity", "beside": f"beside: {name}"}
        said = special.get(self.kind, f"{name} ({self.kind})")
        return f"{said}: known from before" if self.known else said


@dataclass
class Search:
    start: Recipe
    rules: Rules
    lab: Laboratory
    outlook: Outlook
    budget: Budget
    report: Callable[[Search, Doing | None], None] = lambda search, doing: None
    """Called before and after every trial."""
    candidates: list[Candidate] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    base: Candidate = field(init=False)
    lead: Candidate = field(init=False)
    winner: Candidate | None = None
    gain: Ratio | None = None
    """The winner's speed over that of the unchanged recipe."""
    options: MoveOptions = field(init=False)
    _proven: set[frozenset[str]] = field(default_factory=set)
    _suspects: set[str] = field(default_factory=set)
    """Techniques one of which made a jump fail; the climb tries each alone."""

    def __post_init__(self) -> None:
        self.options = MoveOptions(self.rules, self.outlook, self.budget, self._note)

    @property
    def goal(self) -> Goal:
        return self.outlook.goal

    def climb(self) -> None:
        """From the unchanged recipe to the best one found in time, not proved yet."""
        self.begin()
        for recipe in jumps(self.outlook, self.lead.known_recipe, self.rules):
            self._jump(self._leaving_out(recipe, self._suspects))
        while (option := self._next()) is not None:
            self._consider(option)

    def _jump(self, whole: Recipe) -> None:
        """Try a planned recipe, unless the lead is expected to be ahead of it; with smaller micro batches while memory runs out.
        One trial of many techniques does not show which one made it fail: bisect, leaving out the half with the smaller
        expected gain, until it runs."""
        own = dict(self.base.known_recipe.technique_uses())
        suspects = [name for name, _ in whole.technique_uses() if name not in own]
        recipe, left_out = whole, list[str]()
        while identity(recipe) not in self.options.seen and self.outlook.sound(recipe):
            jump = Move(f"{PLANNED}{describe(recipe)}", recipe, MoveKind.JUMP)
            expected = self.outlook.expected(jump, self.lead.known_recipe)
            if self.lead is not self.base and expected < ENOUGH:
                return
            if not self.affordable("rank", recipe):
                self._note_untried(jump, expected)
                return
            option = MoveOption(jump, expected, simpler=is_subset(recipe, self.lead.known_recipe))
            result = self._consider(option)
            if names := self.outlook.breaks(recipe):
                self._suspects |= names
                recipe = whole = self._leaving_out(whole, names)
                continue
            if result.status == "out_of_memory" and recipe.micro > 1:
                whole = with_micro(whole, recipe.micro // 2)
            elif result.ok or result.status in ("out_of_memory", "timed_out"):
                self._suspects |= set(left_out)
                return
            else:
                suspects = [name for name in suspects if name not in left_out]
                left_out = self.outlook.lesser_half(whole, suspects, self.rules)
            recipe = self._leaving_out(whole, left_out)

    def _leaving_out(self, recipe: Recipe, names: Collection[str]) -> Recipe:
        found = sorted(set(names).intersection(dict(recipe.technique_uses())))
        made = without(recipe, found, self.rules) if found else None
        return made.recipe if isinstance(made, Move) else recipe

    def begin(self) -> None:
        """Try the unchanged recipe and trace the reference. A recipe that promises no more than the same loss curve is proved at
        once, because everything builds on it."""
        self.base = self.lead = self._first()
        self._reference()
        recipe = self.base.known_recipe
        if parity_techniques(recipe, self.rules.kept) and self.affordable("prove", recipe, reserve=False):
            self.prove(self.base)
            self.base.state = "start"

    def _first(self) -> Candidate:
        """The unchanged recipe; with a smaller micro batch where it does not fit."""
        start = move = Move("unchanged", self.start, MoveKind.START)
        while True:
            predicted = self.outlook.planner.predict(move.recipe)
            small = move.recipe.micro // 2
            if small and isinstance(predicted, Prediction) and not predicted.fits:
                self.options.prune(move, predicted)
            else:
                candidate = self.add(move, "start")
                result = self.run("rank", candidate)
                if result.ok:
                    return candidate
                candidate.state, candidate.reason = "failed", result.failure
                if result.status == "timed_out":
                    raise MachineError(
                        f"the recipe could not be timed within the budget: {result.reason} Give a larger --budget."
                    )
                if result.status != "out_of_memory" or not small:
                    raise MachineError(
                        f"the recipe does not run here, so there is nothing to tune: {result.reason}"
                    )
            move = with_other_micro(start, small)

    def _reference(self) -> None:
        began, before = self.budget.spent_s, self.budget.clock()
        self.report(self, Doing("plain fp32", "reference"))
        result = self.lab.reference(self._limit().seconds)
        self.budget.note(frozenset(), result.wall_s, self.budget.clock() - before, "reference")
        self.budget.reference_s = result.wall_s
        self.events.append(Event("plain fp32", "reference", began, result.wall_s, result.status))

    def _next(self) -> MoveOption | None:
        """The most promising move there is time for; None ends the climb."""
        waits = float(self.lead.results["rank"].figures.get("waits", 0.0))
        options = self.options.over(self.lead.known_recipe, waits)
        together_s = sum(
            self.budget.expected_s(compiled(option.move.recipe))
            for option in options
            if option.turn is TrialTurn.TOGETHER
        )
        for option in options:
            # Time for the common trial of small gains is set aside.
            aside_s = together_s if option.turn is TrialTurn.FRESH else 0.0
            if self.affordable("rank", option.move.recipe, aside_s=aside_s):
                return option
        for option in options:
            self._note_untried(option.move, option.expected)
        return None

    def _note_untried(self, move: Move, expected: float) -> None:
        self._note(Candidate(move.key, move.recipe, "not tried", "no time was left", expected=expected))

    def _consider(self, option: MoveOption) -> TuneResult:
        """Try a move; it becomes the lead if it is ahead and, as far as known, has parity."""
        move, candidate = option.move, self.add(option.move, "lost")
        candidate.expected, candidate.over = option.expected, self.lead.key
        if option.turn is TrialTurn.TOGETHER:
            self.options.gathered.add(identity(self.lead.known_recipe))
        result, old = self.run("rank", candidate), self.lead.results["rank"]
        if not result.ok:
            candidate.state, candidate.reason = "failed", result.failure
            self.options.lose(move, 0.0)
            return result
        candidate.ratio = self.goal.ratio(result, old)
        sound = not self.outlook.suspect(self.lead.known_recipe)
        first = self.base.results["rank"]
        ahead = self.goal.ahead(result, old, first) if sound else self.goal.fast_enough(result, first)
        ahead = ahead or (option.simpler and candidate.ratio > SIMPLER)
        if ahead and sound and candidate.ratio < CLEAR and self.affordable("confirm", move.recipe):
            result = self._confirmed(candidate)
            ahead = self.goal.ahead(result, old, first) or (option.simpler and candidate.ratio > SIMPLER)
        if not ahead:
            reason = "slower, ended early" if result.figures.get("hopeless") else "lost round 1"
            candidate.reason = f"{reason}: {candidate.ratio:.2f}×"
            near = self.goal.fast_enough(result, first) and option.turn is not TrialTurn.TOGETHER
            self.options.lose(move, candidate.ratio, near=near)
            return result
        own = parity_techniques(move.recipe, self.rules.kept)
        new = bool(own and own not in self._proven)
        if new:
            if not self.affordable("prove", move.recipe, reserve=False):
                candidate.reason = f"{candidate.ratio:.2f}×, but no time was left to prove it"
                return result
            if not self.prove(candidate):
                rest = self.without_idle(candidate)
                if rest is None or parity_techniques(rest.known_recipe, self.rules.kept) not in self._proven:
                    return result
                candidate = rest
        built_upon = new or move.kind is MoveKind.JUMP
        if built_upon and self.affordable("life", candidate.known_recipe) and not self.live(candidate):
            self.options.lose(move, 0.0)
            return result
        candidate.state, candidate.reason = "ahead", f"took the lead: {candidate.ratio:.2f}×"
        self.lead = candidate
        return result

    def without_idle(self, candidate: Candidate) -> Candidate | None:
        """The candidate without techniques that had no effect: as fast, but not proved by itself."""
        if candidate.state != "no effect":
            return None
        other = self._rest(candidate, candidate.results["prove"].without_effect)
        if other is not None:
            other.ratio, other.results["rank"] = candidate.ratio, candidate.results["rank"]
        return other

    def without_broken(self, candidate: Candidate) -> Candidate | None:
        """An unusable candidate without the techniques to blame; its speed has to be measured."""
        return self._rest(candidate, blamed(candidate.life)) if candidate.state == "unusable" else None

    def _rest(self, candidate: Candidate, names: Collection[str]) -> Candidate | None:
        out = [name for name in names if name not in self.rules.kept]
        rest = without(candidate.known_recipe, out, self.rules) if out else None
        if not isinstance(rest, Move) or identity(rest.recipe) in self.options.seen:
            return None
        other = self.add(
            Move(f"{candidate.key}, {rest.key}", rest.recipe, candidate.kind or rest.kind), "ahead"
        )
        other.over = candidate.key
        return other

    def _confirmed(self, candidate: Candidate) -> TuneResult:
        """Confirm a small gain in a second process: a lead by noise is hard to beat."""
        first, again = candidate.results["rank"], self.run("confirm", candidate)
        both = first.pooled(again) if again.ok else first
        candidate.results["rank"] = both
        candidate.ratio = self.goal.ratio(both, self.lead.results["rank"])
        return both

    def prove(self, candidate: Candidate) -> bool:
        """Compare a candidate with plain fp32, and check that every technique took effect."""
        known, result = "prove" in candidate.results, self.run("prove", candidate)
        candidate.round = 3
        if not result.ok:
            candidate.state, candidate.reason = "failed", result.failure
            return False
        if not known and "rank" in candidate.results:
            # It was timed again: compare later candidates with both processes, not with a lucky one.
            candidate.results["rank"] = candidate.results["rank"].pooled(result)
        own = parity_techniques(candidate.known_recipe, self.rules.kept)
        parity = result.parity or {"verdict": "not judged", "class": "", "why": "it was not traced"}
        if parity["verdict"] == "different":
            candidate.state, candidate.reason = "different", f"parity: different; {parity['why']}"
            self.outlook.failed |= {own} if own else set()
            return False
        if parity["verdict"] != "equal" and parity["class"] != Parity.CHANGES.name:
            candidate.state, candidate.reason = "failed", f"parity: not judged; {parity['why']}"
            return False
        self._proven.add(own)
        if idle := [name for name in result.without_effect if name not in self.rules.kept]:
            self.outlook.idle.update(idle)
            candidate.state, candidate.reason = "no effect", f"no effect: {', '.join(idle)}"
            return False
        return True

    def live(self, candidate: Candidate) -> bool:
        """Take a candidate through a short life. An unusable one cannot win; one with an unknown verdict can, and the record says so."""
        if candidate.life is None:
            self._live(candidate)
        if not broken(candidate.life):
            return True
        assert candidate.life is not None
        candidate.state, candidate.reason = "unusable", str(candidate.life["problem"])
        if names := blamed(candidate.life):
            self.outlook.unusable.add(names)
        return False

    def _live(self, candidate: Candidate) -> None:
        began, before, recipe = self.budget.spent_s, self.budget.clock(), candidate.known_recipe
        self.report(self, Doing(candidate.key, "life"))
        life = candidate.life = self.lab.life(recipe, self._limit().seconds)
        wall_s, verdict = sum(part["seconds"] for part in life["parts"]), life["verdict"]
        took = "life" if verdict == "ok" else verdict
        self.budget.note(compiled(recipe), wall_s, self.budget.clock() - before, took)
        self.events.append(Event(candidate.key, "life", began, wall_s, verdict))

    def affordable(self, kind: str, recipe: Recipe, *, reserve: bool = True, aside_s: float = 0.0) -> bool:
        """Whether there is time for a trial and for the final trials after it. `aside_s` is reserved for something else."""
        needed = self.budget.expected_s(compiled(recipe), kind) + aside_s
        if reserve:
            needed += self._last_s() if kind == "prove" else self._reserve_s(recipe)
        return needed <= self.budget.left_s

    def _limit(self, kind: str = "", recipe: Recipe | None = None) -> TrialLimit:
        """The time limit of a trial: a short one leaves time for the proof, and no trial outlasts the budget, except the first. A
        trial slower than the lead is ended, unless the lead has no parity."""
        left = self.budget.left_s
        if recipe is None or kind != "rank" or not any(event.kind == "reference" for event in self.events):
            return TrialLimit(max(left, LEAST_S))
        patience = PATIENCE * self.budget.expected_s(compiled(recipe), kind) + LEAST_S
        seconds = max(left - self._reserve_s(recipe), LEAST_S)
        slowest = self.goal.slowest(self.lead.results["rank"], self.base.results["rank"])
        sound = not self.outlook.suspect(self.lead.known_recipe)
        return TrialLimit(min(seconds, patience), patience <= seconds, slowest if sound else 0.0)

    def _reserve_s(self, recipe: Recipe) -> float:
        """Expected time to prove the lead, or a recipe that may replace it, its life, and to time the first recipe again."""
        kind, lead = compiled(recipe), compiled(self.lead.known_recipe)
        ends = [self.budget.expected_s(kind, "prove") + self.budget.expected_s(kind, "life")]
        proof_s = 0.0 if "prove" in self.lead.results else self.budget.expected_s(lead, "prove")
        ends.append(proof_s + self.budget.expected_s(lead, "life"))
        return max(ends) + self._last_s()

    def _last_s(self) -> float:
        """Expected time to time the first recipe again; without parity it is timed only if time is left."""
        if self.outlook.suspect(self.base.known_recipe):
            return 0.0
        return self.budget.expected_s(compiled(self.base.known_recipe), "decide")

    def add(self, move: Move, state: str) -> Candidate:
        """Add a candidate that will be tried."""
        predicted = self.outlook.planner.predict(move.recipe)
        again = any(other.key == move.key and other.results for other in self.candidates)
        key = f"{move.key}, again" if again else move.key
        candidate = Candidate(key, move.recipe, state, kind=move.kind)
        candidate.prediction = predicted if isinstance(predicted, Prediction) else None
        self.candidates.append(candidate)
        self.options.seen.add(identity(move.recipe))
        return candidate

    def _note(self, candidate: Candidate) -> None:
        """Record a move that is not tried, once."""
        if all(other.key != candidate.key for other in self.candidates):
            candidate.at_s = self.budget.spent_s
            self.candidates.append(candidate)

    def run(self, kind: str, candidate: Candidate) -> TuneResult:
        """The result of a trial of a candidate, run now if it was not before."""
        if kind in candidate.results:
            return candidate.results[kind]
        result = self.measure(kind, candidate, candidate.known_recipe)
        if result.ok:
            candidate.results[kind] = result
        return result

    def measure(self, kind: str, candidate: Candidate, recipe: Recipe) -> TuneResult:
        """Run a trial, with its time on the budget and on the timeline."""
        began, before = self.budget.spent_s, self.budget.clock()
        self.report(self, Doing(candidate.key, kind))
        result = self.lab.trial(kind, recipe, self._limit(kind, recipe))
        took = kind if result.ok and not result.figures.get("hopeless") else "failed"
        self.budget.note(compiled(recipe), result.wall_s, self.budget.clock() - before, took)
        candidate.round = max(candidate.round, 1)
        self.events.append(Event(candidate.key, kind, began, result.wall_s, result.status))
        return result
