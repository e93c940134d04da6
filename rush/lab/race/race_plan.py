"""The plan of a race: the number of tokens, the validation points, the division of runs into legs.

All runs are validated after the same numbers of tokens: multiples of the least common multiple of the contenders' tokens a step.
The tokens of the race are rounded up to such a multiple, and every contender's schedule gets the corresponding number of steps: it
decays over the race, as over a run of that length. The phases of a batch-size schedule are rounded to such multiples, too. Legs
end at validations, so that a leg can be resumed from its checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rush.errors import RecipeError
from rush.lab.race.contenders import Contender, check_comparable
from rush.parallel import check_world
from rush.recipe import Recipe
from rush.recipe_io import changed
from rush.techniques import check_recipe
from rush.training.epochs import steps_for

POINTS, FEWEST_POINTS = 20, 4
LEGS = 4
MOST_SEEDS = 100
RUN = {"run.save_every": 0, "run.keep": 1, "run.sample_every": 0, "run.sample_tokens": 0, "run.trackers": []}
"""Overrides of every run of a race: only training and validations, and a checkpoint at the end of a leg."""


@dataclass(frozen=True)
class RacePlan:
    name: str
    contenders: tuple[Contender, ...]
    seeds: tuple[int, ...]
    tokens: int
    every_tokens: int
    num_legs: int
    until_loss: float | None = None
    budget_s: float | None = None
    techniques: tuple[str, ...] = ()
    """Python files that define further techniques."""

    @property
    def unit(self) -> int:
        """Tokens that steps of every size of all contenders divide."""
        return _unit(self.contenders)

    @property
    def points(self) -> int:
        """Validations of a run."""
        return self.tokens // self.every_tokens

    @property
    def validate_sequences(self) -> int:
        """Sequences of each validation: the most that a recipe asks for, the same for all."""
        return max(one.recipe.run.validate_sequences for one in self.contenders)

    def raced(self, one: Contender, seed: int) -> Recipe:
        """The recipe that a contender runs with this seed."""
        return changed(
            one.recipe,
            {
                **RUN,
                **at_length(one.recipe, self.tokens, self.unit),
                "run.seed": seed,
                "run.validate_every": 0,
                "run.validate_every_tokens": self.every_tokens,
                "run.validate_sequences": self.validate_sequences,
            },
        )

    def leg_ends(self, one: Contender) -> list[int]:
        """The last step of every leg of a contender."""
        ends = [round((leg + 1) * self.points / self.num_legs) for leg in range(self.num_legs)]
        sizes = self.raced(one, self.seeds[0]).batch_sizes()
        return [sizes.step_at(end * self.every_tokens) for end in ends]

    def order(self) -> list[tuple[int, Contender, int]]:
        """Every leg as (number, contender, seed), in order. The first contender changes from leg to leg, so that a machine that
        slows down, or speeds up, affects all alike."""
        found = []
        for number in range(self.num_legs):
            for place, seed in enumerate(self.seeds):
                turn = (number + place) % len(self.contenders)
                found += [(number, one, seed) for one in (*self.contenders[turn:], *self.contenders[:turn])]
        return found


def plan_race(
    contenders: Sequence[Contender],
    *,
    tokens: int | None = None,
    seeds: int = 1,
    loss: float | None = None,
    budget_s: float | None = None,
    points: int = POINTS,
    legs: int = LEGS,
    name: str | None = None,
    techniques: Sequence[str] = (),
    nproc: int | None = None,
) -> RacePlan:
    """A checked plan. Without `tokens`, as many as the recipes train on; without `nproc` every recipe has the ranks of its layout."""
    check_comparable(contenders)
    _check_numbers(tokens, seeds, loss, points, legs)
    if nproc is not None:
        _check_ranks(contenders, nproc)
    wanted = tokens if tokens is not None else _own_tokens(contenders)
    common = _unit(contenders)
    every = -(-wanted // (points * common)) * common
    total = -(-wanted // every) * every
    if total // every < FEWEST_POINTS:
        steps = ", ".join(f"{one.letter} {one.recipe.step_tokens:,}" for one in contenders)
        raise RecipeError(
            f"a race needs at least {FEWEST_POINTS} validations, and of {wanted:,} tokens only {total // every} can be made: all are validated "
            f"after multiples of {common:,} tokens (a step has: {steps}). Give more --tokens, or the recipes the same batch.total_tokens."
        )
    first = contenders[0].recipe.run.seed
    plan = RacePlan(
        name or race_name(contenders),
        tuple(contenders),
        tuple(first + number for number in range(seeds)),
        total,
        every,
        min(legs, total // every),
        loss,
        budget_s,
        tuple(techniques),
    )
    for one in contenders:
        try:
            check_recipe(plan.raced(one, first))
        except RecipeError as error:
            raise RecipeError(f"recipe {one.letter} of the race, over {total:,} tokens: {error}") from None
    return plan


def _unit(contenders: Sequence[Contender]) -> int:
    return math.lcm(*(size for one in contenders for size in one.recipe.step_sizes))


def at_length(recipe: Recipe, tokens: int, unit: int) -> dict[str, Any]:
    """The changes that make a recipe's run have so many tokens. The phases of a batch-size schedule come to whole units."""
    if recipe.batch.schedule is None:
        return {"schedule.steps": tokens // recipe.step_tokens}
    sizes = recipe.batch_sizes(steps_for(recipe, tokens))
    phases, before, steps = [], 0, 0
    for end, size in zip(sizes.ends, sizes.sizes, strict=False):
        until = round(sizes.until(end) / unit) * unit
        if not before < until < tokens:
            raise RecipeError(
                f"its steps of {size:,} tokens would be those of {max(0, sizes.until(end) - before):,} tokens, and in a race their "
                f"number is rounded to a multiple of {unit:,}, less than all {tokens:,}. Give more --tokens, or another batch.schedule."
            )
        steps += (until - before) // size
        phases.append({"tokens": size, "until": steps})
        before = until
    return {"schedule.steps": steps + (tokens - before) // recipe.step_tokens, "batch.schedule": phases}


def _check_ranks(contenders: Sequence[Contender], nproc: int) -> None:
    for one in contenders:
        try:
            check_world(one.recipe.layout.model_dump(), nproc)
        except RecipeError as error:
            raise RecipeError(f"recipe {one.letter} of the race: {error}") from None


def _own_tokens(contenders: Sequence[Contender]) -> int:
    """The length of the runs that the recipes describe, where they agree on it."""
    every = {one.letter: one.recipe.run_tokens for one in contenders}
    if len(set(every.values())) > 1:
        found = ", ".join(f"{letter} {tokens:,}" for letter, tokens in every.items())
        raise RecipeError(
            f"the recipes train on different numbers of tokens ({found}); give --tokens, which all of them train on."
        )
    return next(iter(every.values()))


def _check_numbers(tokens: int | None, seeds: int, loss: float | None, points: int, legs: int) -> None:
    for option, value, least, most in (
        ("--tokens", tokens, 1, 2**62),
        ("--seeds", seeds, 1, MOST_SEEDS),
        ("--points", points, FEWEST_POINTS, 1000),
        ("--legs", legs, 1, 1000),
    ):
        if value is not None and not least <= value <= most:
            raise RecipeError(f"{option} is {value:,}; allowed: a whole number from {least} to {most:,}.")
    if loss is not None and not 0 < loss < math.inf:
        raise RecipeError(f"--loss is {loss}; allowed: a validation loss above zero, as in 3.5.")


def race_name(contenders: Sequence[Contender]) -> str:
    """The names of the recipes, each once."""
    return "-".join(dict.fromkeys(one.name.split()[0] for one in contenders))
