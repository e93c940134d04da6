"""The contenders of a race: from the arguments of the command line to comparable recipes.

    rush race schedule.warmup=10 tiny tiny techniques+=compile
              for all of them    A    B with its own override

`KEY=VALUE` after a recipe changes that recipe, before the first one all of them. Losses are comparable only
for the same objective on the same text with the same vocabulary, and curves only if both recipes read the
same samples in the same order. All other keys may differ.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rush.errors import RecipeError
from rush.ready import short_name
from rush.recipe import Recipe
from rush.recipe_io import differences, load_recipe
from rush.techniques import group_of, registry

MOST = 6
"""Maximum number of contenders: the colors of a page."""
LETTERS = "ABCDEF"
_OVERRIDE = re.compile(r"^[A-Za-z_][\w.-]*\s*(\+=|-=|=)")
SAME = ("data.", "objective.", "batch.sequence", "model.init_from", "run.device")
"""Keys that must be equal for all contenders."""


@dataclass(frozen=True)
class Contender:
    """A recipe with its letter, and the arguments that name it."""

    letter: str
    name: str
    recipe: Recipe


def read_contenders(words: Sequence[str | Recipe]) -> list[Contender]:
    """The contenders of these arguments. An argument with spaces is a recipe followed by its overrides."""
    found: list[tuple[str | Recipe, list[str]]] = []
    shared: list[str] = []
    for word in words:
        if isinstance(word, Recipe):
            found.append((word, []))
        elif _OVERRIDE.match(word) and not os.path.isfile(word):
            (found[-1][1] if found else shared).append(word)
        else:
            name, *more = [word] if os.path.isfile(word) else word.split() or [""]
            found.append((name, more))
    if len(found) < 2:
        raise RecipeError(
            f"a race needs at least two recipes; {len(found)} named. Name another one, or the same with overrides behind it, as in "
            "`rush race tiny tiny techniques+=compile`."
        )
    if len(found) > MOST:
        raise RecipeError(f"a race takes at most {MOST} recipes; {len(found)} named. Leave some out.")
    return [
        _contender(letter, one, shared, more) for letter, (one, more) in zip(LETTERS, found, strict=False)
    ]


def _contender(letter: str, one: str | Recipe, shared: Sequence[str], more: Sequence[str]) -> Contender:
    if isinstance(one, Recipe):
        if shared or more:
            raise RecipeError(
                "overrides beside a Recipe are not applied; change the Recipe, or name it by its file."
            )
        return Contender(letter, one.model.name, one)
    try:
        recipe = load_recipe(one, [*shared, *more])
    except RecipeError as error:
        raise RecipeError(f"recipe {letter} of the race: {error}") from None
    return Contender(letter, " ".join([short_name(one), *more]), recipe)


def check_comparable(contenders: Sequence[Contender]) -> None:
    """Refuse a race whose losses would not be comparable."""
    first = contenders[0]
    for other in contenders[1:]:
        both = f"{first.letter} and {other.letter}"
        for key, (ours, theirs) in differences(first.recipe, other.recipe).items():
            if key.startswith(SAME):
                raise RecipeError(
                    f"{both} cannot race: {key} is {ours!r} in {first.letter} and {theirs!r} in {other.letter}, so their losses are not "
                    f"comparable. Give both the same; {key}=VALUE before the first recipe sets it for all."
                )
        if (ours := _vocabulary(first.recipe)) != (theirs := _vocabulary(other.recipe)):
            raise RecipeError(
                f"{both} cannot race: the vocabulary has {ours:,} tokens in {first.letter} and {theirs:,} in {other.letter}, so their "
                "losses are not comparable. Give both the same data.vocab_size and model.shape.vocab_size."
            )
        if first.recipe.objective.kind != "lm":
            _check_same_documents(first, other)


def _vocabulary(recipe: Recipe) -> int:
    return recipe.shape().vocab_size


def _check_same_documents(first: Contender, other: Contender) -> None:
    """In fine-tuning, packing and batch determine the documents of a step."""
    for what, ours, theirs in (
        ("the packing", _packing(first.recipe), _packing(other.recipe)),
        ("batch.micro", first.recipe.micro, other.recipe.micro),
        ("the tokens of a step", first.recipe.step_tokens, other.recipe.step_tokens),
    ):
        if ours != theirs:
            raise RecipeError(
                f"{first.letter} and {other.letter} cannot race: {what} is {ours} in {first.letter} and {theirs} in {other.letter}, so "
                "after the same tokens they have not read the same documents. Give both the same."
            )


def _packing(recipe: Recipe) -> str:
    known = registry()
    uses = [(name, knobs) for name, knobs in recipe.technique_uses() if name in known]
    named = [f"{name} {knobs or ''}".strip() for name, knobs in uses if group_of(known[name]) == "packing"]
    return ", ".join(named) or "the default"
