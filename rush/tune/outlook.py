"""The expected gain of a move: as measured here before, else as the planner predicts. And the jumps that follow from it.

The planner knows what fits; its predicted times order the trials. `planned` repeatedly follows the best
predicted move, without a trial, to a recipe that is near the optimum if the planner is right. On a GPU it
adds techniques that cost nothing and those that the planner does not model: one trial for all of them instead
of one each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rush.recipe import Recipe
from rush.techniques import Parity, Stage, Technique, registry
from rush.tune.forecast import Planner, Prediction
from rush.tune.goal import Goal
from rush.tune.moves import (
    Move,
    MoveKind,
    Refusal,
    Rules,
    identity,
    moves,
    parity_technique_names,
    parity_techniques,
    with_micro,
    with_technique,
    without,
)

PAYS = 1.005
"""The least predicted gain that `planned` follows."""
BONUS = 0.01
"""Advantage in the order of trials for micro batches, whose effect is hard to predict, and for techniques with a claim of speed."""
UNSEEN = 0.03
"""Penalty in the order of trials for techniques that neither planner nor claim expects to change the speed."""
ROOMY = 0.5
"""Fraction of the memory that an enlarged micro batch may be predicted to take."""
ROUNDING = frozenset({Parity.EXACT, Parity.CLOSE})


@dataclass
class Outlook:
    start: Recipe
    planner: Planner
    goal: Goal
    known: Mapping[str, float]
    """Gains measured on this machine before, by key."""
    kept: frozenset[str] = frozenset()
    failed: set[frozenset[str]] = field(default_factory=set)
    """Sets of parity techniques (`moves.parity_techniques`) whose verdict was different."""
    idle: set[str] = field(default_factory=set)
    """Techniques without effect."""
    unusable: set[frozenset[str]] = field(default_factory=set)
    """Sets of techniques that made a recipe unusable."""
    _moves: dict[tuple[str, frozenset[Parity]], list[Move | Refusal]] = field(default_factory=dict)

    def moves(self, recipe: Recipe, rules: Rules) -> list[Move | Refusal]:
        """Every single move, cached."""
        at = recipe.digest, rules.allowed
        if at not in self._moves:
            self._moves[at] = list(moves(recipe, rules))
        return self._moves[at]

    def fits(self, recipe: Recipe) -> bool:
        predicted = self.planner.predict(recipe)
        return isinstance(predicted, Prediction) and predicted.fits

    def suspect(self, recipe: Recipe) -> bool:
        own = parity_techniques(recipe, self.kept)
        return any(failed <= own for failed in self.failed)

    def sound(self, recipe: Recipe) -> bool:
        """Whether no result so far speaks against it."""
        idle = not self.idle.isdisjoint(dict(recipe.technique_uses()))
        return not (idle or self.suspect(recipe) or self.breaks(recipe))

    def breaks(self, recipe: Recipe) -> frozenset[str]:
        """The techniques of a recipe that made another one unusable."""
        own = dict(recipe.technique_uses()).keys()
        return next((names for names in self.unusable if names <= own), frozenset())

    def expected(self, move: Move, over: Recipe) -> float:
        """The expected ratio of a move for `planned`: as measured here before, else as predicted."""
        return self.known[move.key] if move.key in self.known else self.predicted(move, over)

    def hoped(self, move: Move, over: Recipe) -> float:
        """The expected ratio of a move for the order of trials: no less than the planner's. A move that lost before may have lost
        to noise or on another model, and moves put last are never tried where time is short."""
        return max(self.expected(move, over), self.predicted(move, over))

    def predicted(self, move: Move, over: Recipe) -> float:
        new, old = self.planner.predict(move.recipe), self.planner.predict(over)
        start = self.planner.predict(self.start)
        if isinstance(new, Prediction) and isinstance(old, Prediction) and isinstance(start, Prediction):
            return self.goal.expected(new, old, start)
        return 1.0

    def planned(self, start: Recipe, rules: Rules) -> Recipe:
        """The recipe at the end of the best predicted moves, while one is predicted to pay."""
        at, own = start, {name for name, _ in start.technique_uses()}
        # Remembered gains need not agree: a move and its reverse may both have paid. No recipe is visited twice.
        been = {identity(at)}
        while True:
            options = [
                move
                for move in self.moves(at, rules)
                if isinstance(move, Move) and identity(move.recipe) not in been and self._sure(move.recipe)
            ]
            best = max(options, key=lambda move: self.expected(move, at), default=None)
            if best is None or (self.expected(best, at) < PAYS and not self.suspect(at)):
                break
            at = best.recipe
            been.add(identity(at))
        return self._without_idle(at, own, rules)

    def lesser_half(self, recipe: Recipe, names: Sequence[str], rules: Rules) -> list[str]:
        """The half of these techniques with the smaller expected gain."""
        worth: dict[str, float] = {}
        for name in names:
            made = without(recipe, [name], rules)
            worth[name] = self.expected(made, recipe) if isinstance(made, Move) else 0.0
        return sorted(worth, key=lambda name: -worth[name])[: -(-len(worth) // 2)]

    def rounding_only(self, recipe: Recipe, rules: Rules) -> Recipe:
        """The recipe with techniques of the classes EXACT and CLOSE only."""
        loose = parity_technique_names(recipe, rules.kept)
        made = without(recipe, loose, rules) if loose else None
        return made.recipe if isinstance(made, Move) else recipe

    def filled(self, recipe: Recipe, rules: Rules, takes: Callable[[Technique], bool]) -> Recipe:
        """With every such technique that conflicts with none and is expected to cost nothing."""
        for technique in filter(takes, registry().values()):
            more = with_technique(recipe, technique, rules)
            if more is None or not self._sure(more):
                continue
            move = Move(technique.name, more, MoveKind.TECHNIQUE, technique.name)
            if self.expected(move, recipe) > 2 - PAYS:
                recipe = more
        return recipe

    def widened(self, recipe: Recipe, rules: Rules) -> Recipe:
        """With the largest micro batch that is not expected to be slower and leaves half of the memory free: fewer launches."""
        while rules.tokens % (2 * recipe.micro * recipe.batch.sequence) == 0:
            double = 2 * recipe.micro
            wider = Move(f"micro {double}", with_micro(recipe, double), MoveKind.MICRO)
            found = self.planner.predict(wider.recipe)
            roomy = isinstance(found, Prediction) and found.memory_bytes < ROOMY * found.limit_bytes
            if not roomy or self.expected(wider, recipe) < 1:
                break
            recipe = wider.recipe
        return recipe

    def _without_idle(self, recipe: Recipe, own: set[str], rules: Rules) -> Recipe:
        """Without techniques that were added early and gain nothing with the later ones."""
        for name, _ in recipe.technique_uses():
            made = without(recipe, [name], rules) if name not in own else None
            if isinstance(made, Move) and self._sure(made.recipe) and self.expected(made, recipe) >= 1:
                recipe = made.recipe
        return recipe

    def _sure(self, recipe: Recipe) -> bool:
        predicted = self.planner.predict(recipe)
        return (
            isinstance(predicted, Prediction)
            and predicted.fits
            and not predicted.doubtful
            and self.sound(recipe)
        )


def bonus(move: Move, over: Recipe, expected: float, waits: float) -> float:
    """Advantage of a move in the order of trials, over others with the same expected gain. `waits`: the fraction of a step that
    waits for data."""
    if move.recipe.batch != over.batch:
        return BONUS
    technique = registry().get(move.family)
    if technique is not None and technique.claim.metric == "tokens_per_s":
        return min(BONUS, max(0.0, 0.02 * technique.claim.gain))
    if technique is not None and technique.claim.metric == "data_wait_ms" and waits > PAYS - 1:
        return -waits * technique.claim.gain
    return -UNSEEN if abs(expected - 1) < PAYS - 1 else 0.0


def saves_memory_only(move: Move, over: Recipe, expected: float, goal: Goal) -> bool:
    """Whether a technique saves memory that a search for speed cannot use."""
    technique = registry().get(move.family)
    if technique is None or goal.objective == "memory" or move.recipe.batch != over.batch:
        return False
    return technique.claim.of_memory and expected < PAYS


def helps_host(technique: Technique) -> bool:
    """Whether a technique is exact and works on the host only: it costs nothing on a GPU."""
    return technique.parity is Parity.EXACT and technique.stage in (Stage.ENV, Stage.DATA)


def unmodeled(technique: Technique) -> bool:
    """Whether a technique only rounds, is claimed to speed up a pass, and is not modeled by the planner."""
    passes = technique.stage not in (Stage.ENV, Stage.DATA)
    return passes and technique.parity in ROUNDING and not technique.work and not technique.claim.of_memory


def jumps(outlook: Outlook, start: Recipe, rules: Rules) -> list[Recipe]:
    """The planned recipes with all allowed techniques, with those that only round added to the start (whose parity is known by
    then), and with those that only round; each with and without what the planner does not model."""
    narrow = replace(rules, allowed=rules.allowed & ROUNDING)
    found = [outlook.planned(start, rules)]
    if narrow.allowed != rules.allowed:
        bases = (
            [start, outlook.rounding_only(start, rules)] if parity_techniques(start, rules.kept) else [start]
        )
        found += [outlook.planned(base, narrow) for base in bases]
    if rules.machine.device == "cuda" and outlook.goal.objective != "memory":
        helped = [outlook.filled(outlook.widened(recipe, rules), rules, helps_host) for recipe in found]
        found = [one for recipe in helped for one in (outlook.filled(recipe, rules, unmodeled), recipe)]
    fitting = [recipe for recipe in found if outlook.fits(recipe)] or [start]
    return list({identity(recipe): recipe for recipe in fitting}.values())
