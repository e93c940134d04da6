"""What is expected of a change: as it went here before, else as the planner says. And where that leads on paper.

The planner knows what fits; its time orders what is tried. `planned` follows it all the way: the best single change again and
again, without a trial, to a recipe that is most of the way if the planner is right. On a GPU, what costs nothing and what the
planner is blind to goes along: one trial for all of it, where each alone would take one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rush.recipe import Recipe
from rush.techniques import Parity, Stage, Technique, registry
from rush.tune.forecast import Planner, Prediction
from rush.tune.goal import Goal
from rush.tune.moves import Move, Refusal, Rules, identity, joined, moves, promise, with_micro, without

PAYS = 1.005
"""What a change must promise to be followed on paper."""
BONUS = 0.01
"""What brings a change forward among those that promise alike: batches, whose effect is never quite known, and techniques
that are claimed to make training faster."""
UNSEEN = 0.03
"""What sets one back that neither the planner nor its authors expect to change the speed."""
ROOMY = 0.5
"""Of the memory: what a micro batch may take on paper that is made larger only because there is room."""
ROUNDING = frozenset({Parity.EXACT, Parity.CLOSE})


@dataclass
class Outlook:
    start: Recipe
    planner: Planner
    goal: Goal
    known: Mapping[str, float]
    """What changes gained on this machine before."""
    kept: frozenset[str] = frozenset()
    failed: set[frozenset[str]] = field(default_factory=set)
    """Promises that were broken: what rounds like this learns something else."""
    idle: set[str] = field(default_factory=set)
    """Techniques that were seen to have no effect."""
    unusable: set[frozenset[str]] = field(default_factory=set)
    """Techniques that together made a recipe unusable."""
    _moves: dict[tuple[str, frozenset[Parity]], list[Move | Refusal]] = field(default_factory=dict)

    def moves(self, recipe: Recipe, rules: Rules) -> list[Move | Refusal]:
        """Every single change, made once."""
        at = recipe.digest, rules.allowed
        if at not in self._moves:
            self._moves[at] = list(moves(recipe, rules))
        return self._moves[at]

    def fits(self, recipe: Recipe) -> bool:
        predicted = self.planner.predict(recipe)
        return isinstance(predicted, Prediction) and predicted.fits

    def suspect(self, recipe: Recipe) -> bool:
        own = promise(recipe, self.kept)
        return any(failed <= own for failed in self.failed)

    def sound(self, recipe: Recipe) -> bool:
        """Whether nothing that was proved so far speaks against it."""
        idle = not self.idle.isdisjoint(dict(recipe.technique_uses()))
        return not (idle or self.suspect(recipe) or self.breaks(recipe))

    def breaks(self, recipe: Recipe) -> frozenset[str]:
        """The techniques of a recipe that made another one unusable; none where nothing speaks against it."""
        own = dict(recipe.technique_uses()).keys()
        return next((names for names in self.unusable if names <= own), frozenset())

    def expected(self, move: Move, over: Recipe) -> float:
        """How much better a change is expected to be, where much is built upon it on paper: as it went here before."""
        return self.known[move.key] if move.key in self.known else self.predicted(move, over)

    def hoped(self, move: Move, over: Recipe) -> float:
        """How much better a change may be, where it is tried alone. What went well here before comes forward. What lost is set back
        no further than the planner alone would put it: it may have lost in a busy minute or on another model, asking again
        costs one trial, and what is put last is never asked where time is short."""
        return max(self.expected(move, over), self.predicted(move, over))

    def predicted(self, move: Move, over: Recipe) -> float:
        """What the planner says."""
        new, old = self.planner.predict(move.recipe), self.planner.predict(over)
        start = self.planner.predict(self.start)
        if isinstance(new, Prediction) and isinstance(old, Prediction) and isinstance(start, Prediction):
            return self.goal.expected(new, old, start)
        return 1.0

    def planned(self, start: Recipe, rules: Rules) -> Recipe:
        """The recipe that single changes lead to on paper, the best first, while one promises to pay."""
        at, own = start, {name for name, _ in start.technique_uses()}
        # Gains that are remembered need not agree: there and back again may both have paid. Nothing is passed twice.
        been = {identity(at)}
        while True:
            options = [
                move
                for move in moves(at, rules)
                if isinstance(move, Move) and identity(move.recipe) not in been and self._sure(move.recipe)
            ]
            best = max(options, key=lambda move: self.expected(move, at), default=None)
            if best is None or (self.expected(best, at) < PAYS and not self.suspect(at)):
                break
            at = best.recipe
            been.add(identity(at))
        return self._without_idle(at, own, rules)

    def lesser_half(self, recipe: Recipe, names: Sequence[str], rules: Rules) -> list[str]:
        """Of these techniques of a recipe the half that promises less: without which less is lost."""
        worth: dict[str, float] = {}
        for name in names:
            made = without(recipe, [name], rules)
            worth[name] = self.expected(made, recipe) if isinstance(made, Move) else 0.0
        return sorted(worth, key=lambda name: -worth[name])[: -(-len(worth) // 2)]

    def rounding_only(self, recipe: Recipe, rules: Rules) -> Recipe:
        """The recipe without what promises less than the same up to rounding."""
        loose = sorted(word.split("(")[0] for word in promise(recipe, rules.kept))
        made = without(recipe, loose, rules) if loose else Move("", recipe)
        return made.recipe if isinstance(made, Move) else recipe

    def filled(self, recipe: Recipe, rules: Rules, takes: Callable[[Technique], bool]) -> Recipe:
        """With every such technique that can stand beside all that is there and is expected to cost nothing."""
        for technique in filter(takes, registry().values()):
            more = joined(recipe, technique, rules)
            if more and self._sure(more) and self.expected(Move(technique.name, more), recipe) > 2 - PAYS:
                recipe = more
        return recipe

    def widened(self, recipe: Recipe, rules: Rules) -> Recipe:
        """With the largest micro batch that is not expected to be slower and leaves much of the memory free: fewer passes wait
        for the host."""
        while rules.tokens % (2 * recipe.micro * recipe.batch.sequence) == 0:
            wider = with_micro(Move("", recipe), 2 * recipe.micro)
            found = self.planner.predict(wider.recipe)
            roomy = isinstance(found, Prediction) and found.memory_bytes < ROOMY * found.limit_bytes
            if not roomy or self.expected(wider, recipe) < 1:
                break
            recipe = wider.recipe
        return recipe

    def _without_idle(self, recipe: Recipe, own: set[str], rules: Rules) -> Recipe:
        """Without what was put on early and does nothing beside what came later."""
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


def family(move: Move) -> str:
    """What settings of one technique have in common."""
    return move.key.split("(")[0]


def bonus(move: Move, over: Recipe, expected: float, waits: float) -> float:
    """By how much a change is tried before (or after) others of which as much is expected. `waits`: the share of a step that
    waits for data."""
    if move.recipe.batch != over.batch:
        return BONUS
    technique = registry().get(family(move))
    if technique is not None and technique.claim.metric == "tokens_per_s":
        return min(BONUS, max(0.0, 0.02 * technique.claim.gain))
    if technique is not None and technique.claim.metric == "data_wait_ms" and waits > PAYS - 1:
        return -waits * technique.claim.gain
    return -UNSEEN if abs(expected - 1) < PAYS - 1 else 0.0


def saves_only(move: Move, over: Recipe, expected: float, goal: Goal) -> bool:
    """Whether a change is made to save memory, and neither room nor speed is expected of it that a search for speed could use."""
    technique = registry().get(family(move))
    if technique is None or goal.objective == "memory" or move.recipe.batch != over.batch:
        return False
    return technique.claim.of_memory and expected < PAYS


def helps_host(technique: Technique) -> bool:
    """Whether it changes no bit and works where only the host does: beside a GPU that costs nothing."""
    return technique.parity is Parity.EXACT and technique.stage in (Stage.ENV, Stage.DATA)


def unseen(technique: Technique) -> bool:
    """Whether it only rounds, is claimed to save time in the passes, and the planner counts nothing of that."""
    passes = technique.stage not in (Stage.ENV, Stage.DATA)
    return passes and technique.parity in ROUNDING and not technique.work and not technique.claim.of_memory


def leaps(outlook: Outlook, start: Recipe, rules: Rules) -> list[Recipe]:
    """Where the paper leads with all that is allowed, with what only rounds put on the recipe as it stands (which is proved by
    then), and with what only rounds; each with what the planner does not see, and without it."""
    narrow = replace(rules, allowed=rules.allowed & ROUNDING)
    found = [outlook.planned(start, rules)]
    if narrow.allowed != rules.allowed:
        bases = [start, outlook.rounding_only(start, rules)] if promise(start, rules.kept) else [start]
        found += [outlook.planned(base, narrow) for base in bases]
    if rules.machine.device == "cuda" and outlook.goal.objective != "memory":
        helped = [outlook.filled(outlook.widened(recipe, rules), rules, helps_host) for recipe in found]
        found = [one for recipe in helped for one in (outlook.filled(recipe, rules, unseen), recipe)]
    fitting = [recipe for recipe in found if outlook.fits(recipe)] or [start]
    return list({identity(recipe): recipe for recipe in fitting}.values())
