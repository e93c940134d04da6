"""Moves: the changes of a recipe that a search may try, techniques in their declared settings and the micro batch.

No technique is known here by name. Each declares its conflicts, requirements, parity class and settings; a move adds one
setting, removes what conflicts with it, and is refused with the technique's own message where it cannot run. Tokens per step
stay unchanged: a larger micro batch means fewer accumulation steps. Techniques that change what is learned (adapters) stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from rush.errors import RushError
from rush.hardware import Machine
from rush.recipe import Knob, Recipe
from rush.recipe_io import changed
from rush.techniques import Parity, Stage, Technique, Use, check_recipe, registry, resolve_uses

Entry = str | dict[str, Knob]
Uses = Mapping[str, Mapping[str, Knob]]


class MoveKind(StrEnum):
    """What a move changes."""

    START = "start"
    """Nothing: the recipe unchanged."""
    TECHNIQUE = "technique"
    WITHOUT = "without"
    MICRO = "micro"
    TOGETHER = "together"
    """Several small gains at once."""
    JUMP = "jump"
    """A recipe that the planner composed."""


@dataclass(frozen=True)
class Move:
    """A changed recipe."""

    key: str
    """Name of the change, as in findings: `compile(scope=block)`, `without compile`, `micro 16`."""
    recipe: Recipe
    kind: MoveKind
    family: str = ""
    """Shared by the settings of one technique; empty for other changes."""


@dataclass(frozen=True)
class Refusal:
    """A move that cannot be made here, and why."""

    key: str
    reason: str


@dataclass(frozen=True)
class Rules:
    """The moves that a search may make."""

    machine: Machine
    allowed: frozenset[Parity]
    """Parity classes of the techniques that may be added."""
    kept: frozenset[str]
    """Techniques that are neither removed nor changed."""
    tokens: int
    """Tokens per step in trials, which a micro batch must divide."""


def moves(recipe: Recipe, rules: Rules) -> Iterator[Move | Refusal]:
    """Every single change of a recipe: add or remove a technique, double or halve the micro batch."""
    for technique in registry().values():
        if technique.parity in rules.allowed and technique.name not in rules.kept:
            yield from _settings(recipe, technique, rules)
    for name, _ in recipe.technique_uses():
        if name not in rules.kept:
            yield without(recipe, [name], rules)
    for micro in (2 * recipe.micro, recipe.micro // 2):
        if micro and rules.tokens % (micro * recipe.batch.sequence) == 0:
            yield Move(f"micro {micro}", with_micro(recipe, micro), MoveKind.MICRO)


def with_micro(recipe: Recipe, micro: int) -> Recipe:
    return changed(recipe, {"batch.micro": micro})


def with_other_micro(move: Move, micro: int) -> Move:
    """A move with another micro batch."""
    # Only settings with knobs stay in their family: without knobs the micro batch is what differs.
    family = move.family if move.family != move.key else ""
    return replace(
        move, key=f"{move.key}, micro {micro}", recipe=with_micro(move.recipe, micro), family=family
    )


def named(name: str, knobs: Mapping[str, Knob]) -> str:
    """A technique with its knobs, as a ladder names it."""
    inside = ", ".join(f"{key}={value}" for key, value in knobs.items())
    return f"{name}({inside})" if inside else name


def describe(recipe: Recipe) -> str:
    """The techniques and the micro batch of a recipe, in one line."""
    uses = [named(name, knobs) for name, knobs in recipe.technique_uses()]
    return f"{' + '.join(uses) or 'plain'}, micro {recipe.micro}"


def identity(recipe: Recipe) -> str:
    """Equal for recipes that differ only in the order of techniques or in written-out defaults."""
    uses = sorted(
        named(name, dict(sorted(_with_defaults(name, knobs).items())))
        for name, knobs in recipe.technique_uses()
    )
    return f"{' + '.join(uses)}, {recipe.micro} × {recipe.batch.sequence}"


def runnable(recipe: Recipe, rules: Rules) -> tuple[Recipe, list[Refusal]]:
    """The recipe without techniques that cannot run on this machine, and why not."""
    gone = [Refusal(name, sentence) for name, sentence in _unmet(recipe, rules)]
    names = {refusal.key for refusal in gone}
    return changed(recipe, {"techniques": _entries(recipe, names)}), gone


def parity_techniques(recipe: Recipe, kept: frozenset[str]) -> frozenset[str]:
    """The techniques that decide parity: those that promise no more than the same loss curve, and the optimizer they are used
    with, with its knobs. Empty where only rounding differs."""
    return frozenset(
        named(use.technique.name, use.knobs if use.technique.stage is Stage.UPDATE else {})
        for use in _statistical(recipe, kept)
    )


def parity_technique_names(recipe: Recipe, kept: frozenset[str]) -> list[str]:
    """The names of `parity_techniques`."""
    return sorted(use.technique.name for use in _statistical(recipe, kept))


def _statistical(recipe: Recipe, kept: frozenset[str]) -> list[Use]:
    uses = [use for use in resolve_uses(recipe) if use.technique.name not in kept]
    loose = [use for use in uses if use.technique.parity not in (Parity.EXACT, Parity.CLOSE)]
    return [use for use in uses if use in loose or use.technique.stage is Stage.UPDATE] if loose else []


def compiled(recipe: Recipe) -> frozenset[str]:
    """The techniques that compile in the first step."""
    return frozenset(
        named(use.technique.name, use.knobs)
        for use in resolve_uses(recipe)
        if use.technique.compiles(use.knobs)
    )


def combine_moves(
    recipe: Recipe, keys: Sequence[str], singles: Callable[[Recipe], Sequence[Move | Refusal]]
) -> tuple[Move, list[str]] | None:
    """Several moves at once, and their keys: applied in order, without those that would undo an earlier one. `singles` gives the
    single moves of a recipe. None if fewer than two can be made."""
    at, made = recipe, list[str]()
    for key in keys:
        move = next((one for one in singles(at) if one.key == key), None)
        if isinstance(move, Move) and _difference(recipe, at) <= _difference(recipe, move.recipe):
            at, made = move.recipe, [*made, key]
    return (Move(f"together: {' + '.join(made)}", at, MoveKind.TOGETHER), made) if len(made) > 1 else None


def is_subset(recipe: Recipe, other: Recipe) -> bool:
    """Whether a recipe is the other one without some of its techniques."""
    ours, theirs = recipe.technique_uses(), other.technique_uses()
    return recipe.batch == other.batch and len(ours) < len(theirs) and all(use in theirs for use in ours)


def with_technique(recipe: Recipe, technique: Technique, rules: Rules) -> Recipe | None:
    """The recipe with one more technique; None if it is there, is not allowed, or conflicts."""
    if technique.parity not in rules.allowed or technique.name in rules.kept | set(
        dict(recipe.technique_uses())
    ):
        return None
    for move in _settings(recipe, technique, rules):
        if isinstance(move, Move) and all(
            use in move.recipe.technique_uses() for use in recipe.technique_uses()
        ):
            return move.recipe
    return None


def _difference(old: Recipe, new: Recipe) -> set[str]:
    """What was added, removed or set otherwise."""
    before, after = (
        {*(named(name, knobs) for name, knobs in recipe.technique_uses()), f"micro {recipe.micro}"}
        for recipe in (old, new)
    )
    return before ^ after


def without(recipe: Recipe, names: Sequence[str], rules: Rules) -> Move | Refusal:
    key = f"without {', '.join(names)}"
    return _changed_move(Move(key, recipe, MoveKind.WITHOUT), {}, set(names), rules)


def _settings(recipe: Recipe, technique: Technique, rules: Rules) -> Iterator[Move | Refusal]:
    known, now = registry(), dict(recipe.technique_uses())
    for setting in technique.settings:
        if not setting.when(recipe):
            continue
        added: dict[str, Mapping[str, Knob]] = {technique.name: setting.knobs, **setting.together_with}
        if any(known[name].parity not in rules.allowed for name in added):
            continue
        if all(
            name in now and _with_defaults(name, now[name]) == _with_defaults(name, knobs)
            for name, knobs in added.items()
        ):
            continue  # it is there already
        key = " with ".join(named(name, knobs) for name, knobs in added.items())
        # The technique; with those that come with it, where only they have knobs.
        first = next((place for place, knobs in enumerate(added.values()) if knobs), len(added))
        family = " with ".join(list(added)[: first + 1])
        conflicting = {other for name in added for other in _conflicts(name)}
        move = Move(key, recipe, MoveKind.TECHNIQUE, family)
        yield _changed_move(move, added, {*added, *conflicting}, rules)


def _with_defaults(name: str, knobs: Mapping[str, Knob]) -> dict[str, Knob]:
    """Knobs with their defaults."""
    return {**{knob: known.default for knob, known in registry()[name].knobs.items()}, **knobs}


def _changed_move(move: Move, added: Uses, gone: set[str], rules: Rules) -> Move | Refusal:
    """The move with some techniques added and others removed; techniques whose requirements are lost are removed too."""
    key, recipe = move.key, move.recipe
    if stays := sorted(gone & rules.kept & {name for name, _ in recipe.technique_uses()}):
        return Refusal(key, f"it conflicts with {stays[0]}, which decides what is learned")
    entries = [
        *_entries(recipe, gone),
        *({"name": name, **knobs} if knobs else name for name, knobs in added.items()),
    ]
    try:
        made = changed(recipe, {"techniques": entries})
        unmet = _unmet(made, rules)
        if orphans := {name for name, _ in unmet} - set(added) - rules.kept:
            made = changed(made, {"techniques": _entries(made, orphans)})
            unmet = _unmet(made, rules)
        if unmet:
            return Refusal(key, unmet[0][1])
        check_recipe(made)
    except RushError as error:
        return Refusal(key, str(error))
    return replace(move, recipe=made)


def _unmet(recipe: Recipe, rules: Rules) -> list[tuple[str, str]]:
    return [
        (use.technique.name, requirement.message)
        for use in resolve_uses(recipe)
        for requirement in use.technique.requires
        if not requirement.met(rules.machine, recipe)
    ]


def _entries(recipe: Recipe, gone: set[str]) -> list[Entry]:
    return [
        {"name": name, **knobs} if knobs else name
        for name, knobs in recipe.technique_uses()
        if name not in gone
    ]


def _conflicts(name: str) -> set[str]:
    """The conflicts of a technique, whichever of the two declares them."""
    known = registry()
    return {*known[name].conflicts, *(other for other, one in known.items() if name in one.conflicts)}
