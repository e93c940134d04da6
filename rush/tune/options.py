"""What a search may try next from its lead, in the order of the trials; what is not worth one is noted with the reason.

Changes that were not tried yet come first, by what is expected of each and by the time that its trial takes. When they are used
up, those that were a little ahead, each by no more than chance gives, are tried all at once: small gains add up to what a
trial can see. Then those that lost by little may show themselves on another lead. What is made to save memory and is not
expected to be faster comes last, where speed is the goal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from rush.recipe import Recipe
from rush.tune.budget import Budget
from rush.tune.candidates import Candidate
from rush.tune.forecast import Prediction
from rush.tune.moves import Move, Refusal, Rules, compiled, identity, together, with_micro
from rush.tune.outlook import Outlook, bonus, family, saves_only

HOPELESS = 0.9
"""A change that is predicted to come to less of the lead than this is not tried."""
AGAIN = 0.98
"""A change that lost by less may be tried again on another lead, when all others have been."""
COST = 0.1
"""How much more a change must promise whose trial takes all the time that is left than one whose trial takes none."""


class TrialTurn(IntEnum):
    """Whose turn it is; the order is that of the trials."""

    FRESH = 0
    TOGETHER = 1
    AGAIN = 2
    LAST = 3


@dataclass(frozen=True)
class MoveOption:
    move: Move
    expected: float
    """How much better than the lead."""
    turn: TrialTurn = TrialTurn.FRESH
    simpler: bool = False
    """It only lacks something of the lead, which was put on unseen and has to show that it pays."""


@dataclass
class MoveOptions:
    rules: Rules
    outlook: Outlook
    budget: Budget
    note: Callable[[Candidate], None]
    """Writes down what is not tried."""
    seen: set[str] = field(default_factory=set)
    """What was tried."""
    lost: dict[str, list[float]] = field(default_factory=dict)
    """How changes that were tried and lost compared with the lead, each time."""
    small: dict[str, float] = field(default_factory=dict)
    """Those among them that were ahead when last tried, by no more than chance gives."""
    gathered: set[str] = field(default_factory=set)
    """Leads from which small gains were tried together."""

    def over(self, lead: Recipe, waits: float) -> list[MoveOption]:
        """Changes of the lead that are worth a trial. `waits`: the share of its step that waits for data."""

        def place(option: MoveOption) -> tuple[TrialTurn, float]:
            takes_s = self.budget.expected_s(compiled(option.move.recipe))
            price = COST * min(1.0, takes_s / max(1.0, self.budget.left_s))
            return option.turn, price - option.expected - bonus(option.move, lead, option.expected, waits)

        found = [*self._single(lead), *self._together(lead)]
        return sorted(found, key=place)

    def _single(self, lead: Recipe) -> Iterator[MoveOption]:
        double = 2 * lead.micro
        divides = self.rules.tokens % (double * lead.batch.sequence) == 0
        crowded = divides and not self.outlook.fits(with_micro(Move("", lead), double).recipe)
        for move in self.outlook.moves(lead, self.rules):
            if isinstance(move, Refusal):
                self.note(Candidate(move.key, None, "refused", move.reason))
                continue
            both = [move]
            if crowded and move.recipe.micro == lead.micro:
                # What makes room may pay by a larger micro batch.
                larger = with_micro(move, double)
                both += [larger] if self.outlook.fits(larger.recipe) else []
            for one in both:
                if (option := self._worth(one, lead)) is not None:
                    yield option

    def _together(self, lead: Recipe) -> Iterator[MoveOption]:
        """Small gains at once, the largest first where two cannot stand beside each other; one trial for each lead."""
        if identity(lead) in self.gathered or len(self.small) < 2:
            return
        keys = sorted(self.small, key=lambda key: -self.small[key])
        made = together(lead, keys, lambda recipe: self.outlook.moves(recipe, self.rules))
        if made is None:
            return
        move, these = made
        if identity(move.recipe) in self.seen or not self.outlook.sound(move.recipe):
            return
        if self.outlook.fits(move.recipe):
            yield MoveOption(move, math.prod(self.small[key] for key in these), TrialTurn.TOGETHER)

    def _worth(self, move: Move, lead: Recipe) -> MoveOption | None:
        """What is expected of a change; None where it is not worth a trial."""
        if identity(move.recipe) in self.seen:
            return None
        if tries := self.lost.get(move.key):
            again = len(tries) == 1 and tries[0] >= AGAIN
            return MoveOption(move, AGAIN, TrialTurn.AGAIN) if again else None
        predicted = self.outlook.planner.predict(move.recipe)
        # Another setting of what has just lost will hardly do better.
        others = [
            ratio for key, tries in self.lost.items() if family(move) == key.split("(")[0] for ratio in tries
        ]
        expected = min(self.outlook.hoped(move, lead), max(others, default=math.inf))
        if isinstance(predicted, str):
            self.note(Candidate(move.key, None, "refused", predicted))
        elif not predicted.fits:
            self.prune(move, predicted)
        elif self.outlook.suspect(move.recipe):
            self.note(Candidate(move.key, None, "pruned", "what it rounds was found to learn something else"))
        elif not self.outlook.sound(move.recipe):
            self.note(Candidate(move.key, None, "pruned", "something of it was seen to have no effect"))
        elif expected < HOPELESS and not others:
            words = f"predicted {expected:.2f}×"
            self.note(Candidate(move.key, None, "pruned", words, prediction=predicted, expected=expected))
        else:
            late = saves_only(move, lead, expected, self.outlook.goal)
            return MoveOption(move, expected, TrialTurn.LAST if late else TrialTurn.FRESH)
        return None

    def lose(self, move: Move, ratio: float, *, near: bool = False) -> None:
        """A change was tried and is not ahead. `near`: only its size speaks against it."""
        self.lost.setdefault(move.key, []).append(ratio)
        self.small.pop(move.key, None)
        if near and ratio > 1:
            self.small[move.key] = ratio

    def prune(self, move: Move, predicted: Prediction) -> None:
        """Note that a recipe does not fit on paper."""
        needed, there = predicted.memory_bytes / 2**30, predicted.limit_bytes / 2**30
        words = f"predicted {needed:.3g} GiB of {there:.3g}"
        self.note(Candidate(move.key, None, "pruned", words, prediction=predicted))
