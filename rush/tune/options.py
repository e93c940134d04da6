"""The moves that a search may try next from its lead, in order; moves not worth a trial are recorded with the reason.

Untried moves come first, by expected gain and by the time of their trial. Then moves that were ahead by less than the noise
are tried together: small gains add up to one that a trial can measure. Then moves that lost by little are tried again on
another lead. Techniques that only save memory come last, where speed is the goal.
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
from rush.tune.moves import (
    Move,
    Refusal,
    Rules,
    combine_moves,
    compiled,
    identity,
    with_micro,
    with_other_micro,
)
from rush.tune.outlook import Outlook, bonus, saves_memory_only

HOPELESS = 0.9
"""A move predicted to reach less than this fraction of the lead is not tried."""
AGAIN = 0.98
"""A move that reached this fraction of the lead may be tried again on another lead."""
COST = 0.1
"""Penalty in expected gain of a trial that takes all the time left; less for shorter ones."""


class TrialTurn(IntEnum):
    """The order of the trials."""

    FRESH = 0
    TOGETHER = 1
    AGAIN = 2
    LAST = 3


@dataclass(frozen=True)
class MoveOption:
    move: Move
    expected: float
    """Expected ratio over the lead."""
    turn: TrialTurn = TrialTurn.FRESH
    simpler: bool = False
    """Whether it is the lead without techniques that were added untested and have to show their gain."""


@dataclass(frozen=True)
class LostMove:
    family: str
    ratios: list[float] = field(default_factory=list)
    """Over the lead, of each trial."""


@dataclass
class MoveOptions:
    rules: Rules
    outlook: Outlook
    budget: Budget
    note: Callable[[Candidate], None]
    """Records a move that is not tried."""
    seen: set[str] = field(default_factory=set)
    """Identities of the recipes that were tried."""
    lost: dict[str, LostMove] = field(default_factory=dict)
    """Moves that were tried and lost, by key."""
    small: dict[str, float] = field(default_factory=dict)
    """Ratios of lost moves that were ahead when last tried, but within the noise."""
    gathered: set[str] = field(default_factory=set)
    """Leads from which small gains were tried together."""

    def over(self, lead: Recipe, waits: float) -> list[MoveOption]:
        """Moves from the lead that are worth a trial. `waits`: the fraction of its step that waits for data."""

        def place(option: MoveOption) -> tuple[TrialTurn, float]:
            takes_s = self.budget.expected_s(compiled(option.move.recipe))
            price = COST * min(1.0, takes_s / max(1.0, self.budget.left_s))
            return option.turn, price - option.expected - bonus(option.move, lead, option.expected, waits)

        found = [*self._single(lead), *self._together(lead)]
        return sorted(found, key=place)

    def _single(self, lead: Recipe) -> Iterator[MoveOption]:
        double = 2 * lead.micro
        divides = self.rules.tokens % (double * lead.batch.sequence) == 0
        crowded = divides and not self.outlook.fits(with_micro(lead, double))
        for move in self.outlook.moves(lead, self.rules):
            if isinstance(move, Refusal):
                self.note(Candidate(move.key, None, "refused", move.reason))
                continue
            both = [move]
            if crowded and move.recipe.micro == lead.micro:
                # A move that frees memory may pay by a larger micro batch.
                larger = with_other_micro(move, double)
                both += [larger] if self.outlook.fits(larger.recipe) else []
            for one in both:
                if (option := self._worth(one, lead)) is not None:
                    yield option

    def _together(self, lead: Recipe) -> Iterator[MoveOption]:
        """Small gains together, the largest first where two conflict; one trial for each lead."""
        if identity(lead) in self.gathered or len(self.small) < 2:
            return
        keys = sorted(self.small, key=lambda key: -self.small[key])
        made = combine_moves(lead, keys, lambda recipe: self.outlook.moves(recipe, self.rules))
        if made is None:
            return
        move, these = made
        if identity(move.recipe) in self.seen or not self.outlook.sound(move.recipe):
            return
        if self.outlook.fits(move.recipe):
            yield MoveOption(move, math.prod(self.small[key] for key in these), TrialTurn.TOGETHER)

    def _worth(self, move: Move, lead: Recipe) -> MoveOption | None:
        """The move with its expected gain; None if it is not worth a trial."""
        if identity(move.recipe) in self.seen:
            return None
        if tried := self.lost.get(move.key):
            again = len(tried.ratios) == 1 and tried.ratios[0] >= AGAIN
            return MoveOption(move, AGAIN, TrialTurn.AGAIN) if again else None
        predicted = self.outlook.planner.predict(move.recipe)
        # Another setting of a technique that lost will hardly do better.
        same = [one for one in self.lost.values() if move.family and one.family == move.family]
        others = [ratio for one in same for ratio in one.ratios]
        expected = min(self.outlook.hoped(move, lead), max(others, default=math.inf))
        if isinstance(predicted, str):
            self.note(Candidate(move.key, None, "refused", predicted))
        elif not predicted.fits:
            self.prune(move, predicted)
        elif self.outlook.suspect(move.recipe):
            self.note(Candidate(move.key, None, "pruned", "its rounding was found to change what is learned"))
        elif not self.outlook.sound(move.recipe):
            self.note(Candidate(move.key, None, "pruned", "one of its techniques has no effect"))
        elif expected < HOPELESS and not others:
            reason = f"predicted {expected:.2f}×"
            self.note(Candidate(move.key, None, "pruned", reason, prediction=predicted, expected=expected))
        else:
            late = saves_memory_only(move, lead, expected, self.outlook.goal)
            return MoveOption(move, expected, TrialTurn.LAST if late else TrialTurn.FRESH)
        return None

    def lose(self, move: Move, ratio: float, *, near: bool = False) -> None:
        """Record a move that is not ahead. `near`: only the size of its gain speaks against it."""
        self.lost.setdefault(move.key, LostMove(move.family)).ratios.append(ratio)
        self.small.pop(move.key, None)
        if near and ratio > 1:
            self.small[move.key] = ratio

    def prune(self, move: Move, predicted: Prediction) -> None:
        """Record that a recipe is predicted not to fit."""
        needed, there = predicted.memory_bytes / 2**30, predicted.limit_bytes / 2**30
        reason = f"predicted {needed:.3g} GiB of {there:.3g}"
        self.note(Candidate(move.key, None, "pruned", reason, prediction=predicted))
