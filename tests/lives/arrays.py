"""Which recipes live: the wanted pairs of every setting, and the arrays that cover them.

Pairs are wanted on both families: in pretraining where the check allows it there, else in fine-tuning, else with
preferences. Besides, each technique is wanted with every objective and with every axis of the layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rush.hardware import Machine
from rush.parallel import AXES
from tests.lives.covering import Items, allowed_pairs, covering, smallest
from tests.lives.small import FAMILIES, OBJECTIVES, Checked, Item, Setting, apart, items


@dataclass(frozen=True)
class Wanted:
    """What must occur in a setting, each with the smallest allowed recipe that holds it."""

    checked: Checked
    pairs: dict[Items, Items]
    singles: dict[Items, Items]


def wanted(machine: Machine) -> Iterator[Wanted]:
    """Everything that the check allows on this machine, setting by setting; layouts of two ranks on a CPU only."""
    every = items()
    for family in FAMILIES:
        before: set[Items] = set()
        for objective in OBJECTIVES:
            one = _wanted(Setting(family, objective, device=machine.device), machine, every, pairs=True)
            new = {pair: whole for pair, whole in one.pairs.items() if pair not in before}
            before |= one.pairs.keys()
            yield Wanted(one.checked, new, one.singles)
        for axis in AXES if machine.device == "cpu" else ():
            yield _wanted(Setting(family, "lm", axis), machine, every, pairs=False)


def _wanted(setting: Setting, machine: Machine, every: list[Item], pairs: bool) -> Wanted:
    checked = Checked(setting, machine)
    alone = {frozenset([item]): smallest([item], every, checked.allowed) for item in every}
    possible = [item for item in every if alone[frozenset([item])] is not None]
    return Wanted(
        checked,
        allowed_pairs(possible, checked.allowed, apart) if pairs else {},
        {one: whole for one, whole in alone.items() if whole is not None},
    )


def array(one: Wanted) -> list[Items]:
    """Recipes in which each wanted pair and each wanted technique of the setting occurs."""
    every = sorted(frozenset().union(*one.singles))
    return list(covering({**one.singles, **one.pairs}, every, one.checked.allowed))
