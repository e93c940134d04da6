"""What may be changed about a recipe: techniques in the settings they declare worth a trial, and the micro batch.

No technique is known here by name. Its file says what it conflicts with, what it requires, how it may change what is
learned and which settings are worth a trial; a move puts one of them on, takes out what cannot stand beside it, and is
refused in the technique's own words where it cannot run. The tokens of a step stay what the recipe says: a larger micro
batch means fewer of them. What the recipe itself changes about learning (adapters) is kept as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rush.errors import RushError
from rush.hardware import Machine
from rush.recipe import Knob, Recipe
from rush.recipe_io import changed
from rush.techniques import Parity, Stage, Technique, check, registry, resolve_uses

Entry = str | dict[str, Knob]
Uses = Mapping[str, Mapping[str, Knob]]


@dataclass(frozen=True)
class Move:
    """One change of a recipe."""

    key: str
    """What is changed, as findings name it: `compile(scope=block)`, `without compile`, `micro 16`."""
    recipe: Recipe


@dataclass(frozen=True)
class Refusal:
    """A change that cannot be made here."""

    key: str
    reason: str


@dataclass(frozen=True)
class Rules:
    """Within what a search may move."""

    machine: Machine
    allowed: frozenset[Parity]
    """Classes of the techniques that may be put on."""
    kept: frozenset[str]
    """Techniques that are neither taken out nor changed."""
    tokens: int
    """Of a step, in trials: what a micro batch must divide."""


def moves(recipe: Recipe, rules: Rules) -> Iterator[Move | Refusal]:
    """Every single change of a recipe: put a technique on, take one out, double or halve the micro batch."""
    for technique in registry().values():
        if technique.parity in rules.allowed and technique.name not in rules.kept:
            yield from _settings(recipe, technique, rules)
    for name, _ in recipe.technique_uses():
        if name not in rules.kept:
            yield _made(f"without {name}", recipe, {}, {name}, rules)
    for micro in (2 * recipe.micro, recipe.micro // 2):
        if micro and rules.tokens % (micro * recipe.batch.sequence) == 0:
            yield with_micro(Move("", recipe), micro)


def with_micro(move: Move, micro: int) -> Move:
    """The same with another micro batch."""
    words = f"{move.key}, micro {micro}" if move.key else f"micro {micro}"
    return Move(words, changed(move.recipe, {"batch.micro": micro}))


def named(name: str, knobs: Mapping[str, Knob]) -> str:
    """A technique in a setting, as a ladder names it."""
    inside = ", ".join(f"{key}={value}" for key, value in knobs.items())
    return f"{name}({inside})" if inside else name


def describe(recipe: Recipe) -> str:
    """What a search may change of a recipe, in one line."""
    uses = [named(name, knobs) for name, knobs in recipe.technique_uses()]
    return f"{' + '.join(uses) or 'plain'}, micro {recipe.micro}"


def identity(recipe: Recipe) -> str:
    """What a search may change of a recipe: the same for techniques in another order, or with defaults written out."""
    uses = sorted(
        named(name, dict(sorted(_whole(name, knobs).items()))) for name, knobs in recipe.technique_uses()
    )
    return f"{' + '.join(uses)}, {recipe.micro} × {recipe.batch.sequence}"


def runnable(recipe: Recipe, rules: Rules) -> tuple[Recipe, list[Refusal]]:
    """The recipe without what cannot run on this machine, and why."""
    gone = [Refusal(name, sentence) for name, sentence in _unmet(recipe, rules)]
    names = {refusal.key for refusal in gone}
    return changed(recipe, {"techniques": _entries(recipe, names)}), gone


def promise(recipe: Recipe, kept: frozenset[str]) -> frozenset[str]:
    """What decides whether it learns the same: techniques that promise no more than the same curve, and the update they
    stand beside, with its settings. Empty where rounding is all that differs."""
    uses = [use for use in resolve_uses(recipe) if use.technique.name not in kept]
    loose = [use for use in uses if use.technique.parity not in (Parity.EXACT, Parity.CLOSE)]
    updates = [use for use in uses if use.technique.stage is Stage.UPDATE] if loose else []
    return frozenset(
        [
            *(use.technique.name for use in loose if use not in updates),
            *(named(use.technique.name, use.knobs) for use in updates),
        ]
    )


def compiled(recipe: Recipe) -> frozenset[str]:
    """What makes the first step of a trial long."""
    return frozenset(
        named(use.technique.name, use.knobs)
        for use in resolve_uses(recipe)
        if use.technique.compiles(use.knobs)
    )


def together(
    recipe: Recipe, keys: Sequence[str], singles: Callable[[Recipe], Sequence[Move | Refusal]]
) -> tuple[Move, list[str]] | None:
    """Several changes at once, and which: one after another as named, but none that would undo an earlier one. `singles` gives
    the single changes of a recipe. None where fewer than two can be made."""
    at, made = recipe, list[str]()
    for key in keys:
        move = next((one for one in singles(at) if one.key == key), None)
        if isinstance(move, Move) and _difference(recipe, at) <= _difference(recipe, move.recipe):
            at, made = move.recipe, [*made, key]
    return (Move(f"together: {' + '.join(made)}", at), made) if len(made) > 1 else None


def less_than(recipe: Recipe, other: Recipe) -> bool:
    """Whether it is another recipe without some of its techniques."""
    ours, theirs = recipe.technique_uses(), other.technique_uses()
    return recipe.batch == other.batch and len(ours) < len(theirs) and all(use in theirs for use in ours)


def joined(recipe: Recipe, technique: Technique, rules: Rules) -> Recipe | None:
    """The recipe with a technique beside all that is there; None where it is there, is not allowed, or something would go."""
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
    """What was put on, taken out or set otherwise."""
    before, after = (
        {*(named(name, knobs) for name, knobs in recipe.technique_uses()), f"micro {recipe.micro}"}
        for recipe in (old, new)
    )
    return before ^ after


def without(recipe: Recipe, names: Sequence[str], rules: Rules) -> Move | Refusal:
    """The recipe with these techniques taken out."""
    return _made(f"without {', '.join(names)}", recipe, {}, set(names), rules)


def _settings(recipe: Recipe, technique: Technique, rules: Rules) -> Iterator[Move | Refusal]:
    known, now = registry(), dict(recipe.technique_uses())
    for setting in technique.settings:
        if not setting.when(recipe):
            continue
        added: dict[str, Mapping[str, Knob]] = {technique.name: setting.knobs, **setting.together_with}
        if any(known[name].parity not in rules.allowed for name in added):
            continue
        if all(
            name in now and _whole(name, now[name]) == _whole(name, knobs) for name, knobs in added.items()
        ):
            continue  # it is there already
        key = " with ".join(named(name, knobs) for name, knobs in added.items())
        conflicting = {other for name in added for other in _conflicts(name)}
        yield _made(key, recipe, added, {*added, *conflicting}, rules)


def _whole(name: str, knobs: Mapping[str, Knob]) -> dict[str, Knob]:
    """Knobs with the defaults of those that are not named."""
    return {**{knob: known.default for knob, known in registry()[name].knobs.items()}, **knobs}


def _made(key: str, recipe: Recipe, added: Uses, gone: set[str], rules: Rules) -> Move | Refusal:
    """The recipe without some techniques and with others; what no longer has what it needs goes, too."""
    if stays := sorted(gone & rules.kept & {name for name, _ in recipe.technique_uses()}):
        return Refusal(key, f"it cannot stand beside {stays[0]}, which says what is learned")
    entries = [
        *_entries(recipe, gone),
        *({"name": name, **knobs} if knobs else name for name, knobs in added.items()),
    ]
    try:
        made = changed(recipe, {"techniques": entries})
        if orphans := {name for name, _ in _unmet(made, rules)} - set(added) - rules.kept:
            made = changed(made, {"techniques": _entries(made, orphans)})
        for _, sentence in _unmet(made, rules):
            return Refusal(key, sentence)
        check(made, rules.machine)
    except RushError as error:
        return Refusal(key, str(error))
    return Move(key, made)


def _unmet(recipe: Recipe, rules: Rules) -> Iterator[tuple[str, str]]:
    for use in resolve_uses(recipe):
        for requirement in use.technique.requires:
            if not requirement.met(rules.machine, recipe):
                yield use.technique.name, requirement.message


def _entries(recipe: Recipe, gone: set[str]) -> list[Entry]:
    return [
        {"name": name, **knobs} if knobs else name
        for name, knobs in recipe.technique_uses()
        if name not in gone
    ]


def _conflicts(name: str) -> set[str]:
    """What cannot stand beside a technique; either of two may be the one that says so."""
    known = registry()
    return {*known[name].conflicts, *(other for other, one in known.items() if name in one.conflicts)}
