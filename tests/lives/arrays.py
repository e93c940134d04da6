"""Which recipes live: the wanted pairs of every setting, and the arrays that cover them.

Pairs are wanted on both families: in pretraining where the check allows it there, else in fine-tuning, else with
preferences. Besides, each technique is wanted with every objective and with every axis of the layout. On a CPU all of it runs
with the kernels in C++ that a user there has, and what has none with Triton's interpreted.

`make test` takes few lives from all settings together (`joint.py`). The slow set has every pair of every setting by itself. A
GPU has an array for each setting, without what only costs more of the same: a pair that both families allow occurs on one of
them, and what waits for a compiler occurs in all its pairs, but not again with preferences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache

from rush.hardware import Machine, probe
from rush.parallel import AXES
from rush.techniques import registry
from tests.lives.covering import Items, allowed_pairs, covering, smallest
from tests.lives.small import FAMILIES, INSTEAD, OBJECTIVES, Checked, Item, Setting, apart, items


@dataclass(frozen=True)
class Wanted:
    """What must occur in a setting: pairs and single techniques, each with the smallest allowed recipe that holds it."""

    checked: Checked
    pairs: Mapping[Items, Items]
    singles: Mapping[Items, Items]

    @property
    def everything(self) -> dict[Items, Items]:
        return {**self.singles, **self.pairs}

    @property
    def recipes(self) -> list[Items]:
        """One for each."""
        return list(dict.fromkeys(self.everything.values()))


def wanted(machine: Machine) -> Iterator[Wanted]:
    """Everything that the check allows on this machine, setting by setting; layouts of two ranks on a CPU only."""
    cpu = machine.device == "cpu"
    for family in FAMILIES:
        before: set[Items] = set()
        for objective, axis in [(one, None) for one in OBJECTIVES] + [("lm", axis) for axis in AXES if cpu]:
            alone: set[Items] = set()
            for interpreted in (False, True) if cpu else (False,):
                one = _wanted(Setting(family, objective, axis, machine.device, interpreted), machine)
                pairs = {pair: whole for pair, whole in one.pairs.items() if pair not in before}
                singles = {item: whole for item, whole in one.singles.items() if item not in alone}
                before |= pairs.keys()
                alone |= singles.keys()
                yield Wanted(one.checked, _needed(pairs), singles)


@cache
def on_a_cpu() -> list[Wanted]:
    """Everything that this machine's CPU allows."""
    return list(wanted(probe("cpu")))


def _wanted(setting: Setting, machine: Machine) -> Wanted:
    every, checked = items(), Checked(setting, machine)
    alone = {frozenset([item]): smallest([item], every, checked.allowed) for item in every}
    possible = [item for item in every if alone[frozenset([item])] is not None]
    pairs = {} if setting.axis else allowed_pairs(possible, checked.allowed, apart)
    return Wanted(checked, pairs, {one: whole for one, whole in alone.items() if whole is not None})


def _needed(pairs: Mapping[Items, Items]) -> dict[Items, Items]:
    """Without the pairs of an item that only stands in for another where that is not allowed."""

    def usual(pair: Items) -> Items:
        return frozenset(Item(item.name) if item.name in INSTEAD else item for item in pair)

    return {pair: whole for pair, whole in pairs.items() if usual(pair) == pair or usual(pair) not in pairs}


def array(one: Wanted) -> list[Items]:
    """Recipes in which each wanted pair and each wanted technique of the setting occurs."""
    every = sorted(frozenset().union(*one.everything.values()))
    return list(covering(one.everything, every, one.checked.allowed))


def quick(settings: list[Wanted]) -> list[Wanted]:
    """What is wanted of each setting on a GPU."""
    return [_quick(one, settings) for one in settings]


def _quick(one: Wanted, settings: list[Wanted]) -> Wanted:
    setting = one.checked.setting
    others = [
        other
        for other in settings
        if other.checked.setting != setting
        and replace(other.checked.setting, family=setting.family) == setting
    ]
    singles, pairs = one.singles, one.pairs
    if setting.objective == "dpo":
        singles = {key: whole for key, whole in singles.items() if not compiles(whole)}
    turn = FAMILIES.index(setting.family)
    for other in others:
        singles = _share(singles, other.singles, turn)
        pairs = _share(pairs, other.pairs, turn)
    return Wanted(one.checked, pairs, singles)


def by_turns(pairs: Mapping[Items, Items]) -> dict[Items, Items]:
    """Of two techniques that are wanted with several knobs, one pair; the next two have other knobs."""
    same: dict[tuple[str, ...], list[Items]] = {}
    for pair in sorted(pairs, key=sorted):
        same.setdefault(tuple(sorted(item.name for item in pair)), []).append(pair)
    several = [ways for ways in same.values() if len(ways) > 1]
    left_out = {pair for turn, ways in enumerate(several) for pair in ways if pair != ways[turn % len(ways)]}
    return {pair: whole for pair, whole in pairs.items() if pair not in left_out}


def _share(mine: Mapping[Items, Items], theirs: Mapping[Items, Items], turn: int) -> dict[Items, Items]:
    """What only this family has, and every second one that both have; all pairs of what compiles on one family, so that they
    fill few recipes."""
    compiled = [item for item in items() if _compiles(item)]
    both = sorted(sorted(key) for key in mine.keys() & theirs.keys())
    turns = {}
    for number, key in enumerate(both):
        slow = [compiled.index(item) for item in key if item in compiled]
        turns[frozenset(key)] = (slow[0] if slow else number) % 2
    return {key: whole for key, whole in mine.items() if turns.get(key, turn) == turn}


def compiles(chosen: Items) -> bool:
    """Whether the recipe waits for a compiler."""
    return any(_compiles(item) for item in chosen)


@cache
def _compiles(item: Item) -> bool:
    technique = registry()[item.name]
    return technique.compiles(
        {**{key: knob.default for key, knob in technique.knobs.items()}, **dict(item.knobs)}
    )
