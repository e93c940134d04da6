"""The longest sequence: which techniques are predicted to free most memory, and what really fits.

Speed does not count, so nothing is ranked: the planner proposes recipes at micro batch 1, trials double and bisect the length
until it is known to an eighth, and the winner is proved as any other, at the recipe's own length. Tokens per step stay as near
to the recipe's as whole sequences allow.
"""

from __future__ import annotations

from dataclasses import replace

from rush.lab.ladder.limits import longest
from rush.lab.trial.trial import Outcome
from rush.recipe import Recipe
from rush.recipe_io import CONSTANT_BATCH, changed
from rush.records.tune import PLANNED
from rush.tune.candidates import Candidate
from rush.tune.forecast import Prediction
from rush.tune.moves import Move, MoveKind, Rules, describe
from rush.tune.outlook import ROUNDING
from rush.tune.search import Search

ROOM = 1.01
"""The least predicted gain in length for one more technique."""

UNIT = 128
"""The planner's lengths are multiples of this."""


def lengthen(search: Search) -> Candidate:
    """The winner of a search for the longest sequence."""
    search.begin()
    single = at_length(search.start, search.start.batch.sequence)
    narrow = replace(search.rules, allowed=search.rules.allowed & ROUNDING)
    planned = {
        recipe.digest: recipe
        for rules in (search.rules, narrow)
        if (recipe := _roomiest(search, single, rules))
    }
    for recipe in {**planned, single.digest: single}.values():
        candidate = search.add(Move(f"{PLANNED}{describe(recipe)}", recipe, MoveKind.JUMP), "lost")
        found = _fitting(search, candidate)
        if not found:
            candidate.state, candidate.reason = "failed", "none of the lengths tried fits"
        elif search.prove(candidate):
            candidate.recipe = at_length(recipe, found)
            if search.live(candidate):
                candidate.state, candidate.reason = "won", f"sequences of {found:,} tokens fit"
                search.winner = candidate
                break
    if search.winner is None:
        search.winner = search.base
        search.live(search.base)
    search.winner.state = "won"
    search.report(search, None)
    return search.winner


def at_length(recipe: Recipe, sequence: int) -> Recipe:
    """Micro batch 1 at this length; as many sequences per step as come nearest to its tokens."""
    total = max(1, round(recipe.step_tokens / sequence)) * sequence
    return changed(
        recipe, {"batch.micro": 1, "batch.sequence": sequence, "batch.total_tokens": total, **CONSTANT_BATCH}
    )


def _room(search: Search, recipe: Recipe) -> int:
    """The longest sequence predicted to fit."""
    predicted = search.outlook.planner.predict(recipe, limits=True)
    return predicted.longest_sequence if isinstance(predicted, Prediction) and not predicted.doubtful else 0


def _roomiest(search: Search, recipe: Recipe, rules: Rules) -> Recipe:
    """The recipe at the end of the moves that are predicted to allow the longest sequences."""
    while True:
        options = [move.recipe for move in search.outlook.moves(recipe, rules) if isinstance(move, Move)]
        options = [option for option in options if option.batch == recipe.batch]
        best = max(options, key=lambda option: _room(search, option), default=recipe)
        if _room(search, best) < ROOM * max(1, _room(search, recipe)):
            return recipe
        recipe = best


def _fitting(search: Search, candidate: Candidate) -> int | None:
    """The longest sequence of a recipe whose trial succeeded; None if none did."""
    recipe, up_to = candidate.known_recipe, candidate.known_recipe.shape().context

    def attempt(sequence: int) -> Outcome:
        long = at_length(recipe, sequence)
        if not search.affordable("rank", long):
            return Outcome("timed_out", "no time was left")
        result = search.measure("length", candidate, long)
        return Outcome(result.status, result.reason, {})

    own, room = recipe.batch.sequence, _room(search, recipe)
    if room + UNIT > up_to and attempt(up_to).status == "ok":
        return up_to  # the model reads no more
    start = max(own, int(0.75 * room) // 64 * 64)
    memory = int(search.outlook.planner.target.memory_bytes)
    found, _ = longest(attempt, min(start, up_to), up_to, memory)
    return found or (longest(attempt, own, up_to, memory)[0] if start > own else None)
