"""Few lives over all settings: each allowed pair in one of them, each technique with every objective and on two ranks, each axis.

A pair that a fine-tuning run has already met on two ranks teaches nothing new in pretraining. So all settings share one list of
what is missing: whichever setting covers most of it, for the time its life takes, has the next life. What costs time is
compiling (Dynamo traces the training and the validation graph, in two processes), interpreting Triton and a second rank.

Of techniques with several ways to do the same (`small.ALSO`) a pair has one way, by turns. What compiles meets every other
technique, but neither ranks nor preferences. `make test-all` has each technique with every axis, setting by setting.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from tests.lives.arrays import Wanted, by_turns, compiles, on_a_cpu
from tests.lives.covering import Items
from tests.lives.small import Checked, Item, Setting

COMPILING, INTERPRETING, RANKS = 3.0, 1.0, 1.0
"""What these add to the cost of a life, in costs of a plain one."""
TURN = 0.01
"""By how much a family that had a life stands back: of two that cover the same, the other is next."""
Met = tuple[str, bool, Item | str]
"""A technique, or an axis of the layout, with an objective, on one rank or on two."""


@dataclass(frozen=True)
class Life:
    checked: Checked
    techniques: Items

    @property
    def setting(self) -> Setting:
        return self.checked.setting


class Missing:
    """What no life has yet."""

    def __init__(self, settings: Sequence[Wanted]) -> None:
        """At the beginning: everything."""
        every = {pair: whole for one in settings for pair, whole in one.pairs.items()}
        self.partners: dict[Item, set[Item]] = {}
        for one, other in map(tuple, by_turns(every)):
            self.partners.setdefault(one, set()).add(other)
            self.partners.setdefault(other, set()).add(one)
        self.met: set[Met] = {
            met for one in settings for key in one.singles for met in _met(one.checked.setting, key)
            if not (compiles(key) and (one.checked.setting.axis or one.checked.setting.objective == "dpo"))
        }  # fmt: skip

    def __bool__(self) -> bool:
        return bool(self.met) or any(self.partners.values())

    def gain(self, setting: Setting, chosen: Items, item: Item) -> int:
        """How much of it `item` adds to a life of `chosen`."""
        return len(self.partners.get(item, set()) & chosen) + len(_met(setting, [item]) & self.met)

    def by(self, life: Life) -> int:
        """How much of it a life has."""
        pairs = sum(len(self.partners.get(item, set()) & life.techniques) for item in life.techniques) // 2
        return pairs + len(_met(life.setting, life.techniques) & self.met)

    def remove(self, life: Life) -> None:
        for item in life.techniques:
            self.partners.get(item, set()).difference_update(life.techniques)
        self.met -= _met(life.setting, life.techniques)


def _met(setting: Setting, chosen: Iterable[Item]) -> set[Met]:
    axes = [setting.axis] if setting.axis else []
    return {(setting.objective, bool(axes), one) for one in (*chosen, *axes)}


def joint(settings: Sequence[Wanted]) -> list[Life]:
    """The lives of `make test`, the most useful first."""
    missing, lived = Missing(settings), Counter[str]()
    starts = [(one, wholes) for one in settings for wholes in _starts(one)]
    lives: list[Life] = []
    # What a start can cover only shrinks: one that is still the best when it is looked at again is the best there is.
    queue = [(-float("inf"), place) for place in range(len(starts))]
    while missing:
        _, place = heapq.heappop(queue)
        life = _grown(*starts[place], missing)
        if life is None:
            continue
        worth = missing.by(life) / _cost(life) / (1 + TURN * lived[life.setting.family])
        if queue and -worth > queue[0][0]:
            heapq.heappush(queue, (-worth, place))
            continue
        lives.append(life)
        missing.remove(life)
        lived[life.setting.family] += 1
        heapq.heappush(queue, (-worth, place))
    return lives


@cache
def quick_lives() -> list[Life]:
    """Those on this machine's CPU."""
    return joint(on_a_cpu())


def _starts(one: Wanted) -> Iterator[list[Items]]:
    """The smallest recipes of a setting that a life may begin with: without a compiler, and with any."""
    wholes = list(dict.fromkeys(one.everything.values()))
    plain = [whole for whole in wholes if not compiles(whole)]
    yield plain
    if len(plain) < len(wholes):
        yield wholes


def _cost(life: Life) -> float:
    compiled = COMPILING if compiles(life.techniques) else 0.0
    interpreted = INTERPRETING if life.setting.interpreted else 0.0
    return (1.0 + interpreted + compiled) * (1.0 + (RANKS if life.setting.axis else 0.0))


def _grown(one: Wanted, wholes: Sequence[Items], missing: Missing) -> Life | None:
    """The smallest recipe with most in it, and again and again the technique that adds most."""
    checked = one.checked
    first = max(wholes, key=lambda whole: (missing.by(Life(checked, whole)), sorted(whole)), default=None)
    if first is None or not missing.by(Life(checked, first)):
        return None
    chosen, left = first, sorted(frozenset().union(*wholes))
    while True:
        gains = [(missing.gain(checked.setting, chosen, item), item) for item in left if item not in chosen]
        gains = sorted((pair for pair in gains if pair[0]), key=lambda pair: -pair[0])
        fitting = next((item for _, item in gains if checked.allowed(chosen | {item})), None)
        if fitting is None:
            return Life(checked, chosen)
        chosen |= {fitting}


def killed(lives: Sequence[Life]) -> list[bool]:
    """Which lives are killed and resumed: one with a technique that no such life of its objective, or on two ranks, has had.

    What compiles is not: a resume waits for Dynamo once more.
    """
    had: set[Met] = set()
    told = []
    for life in lives:
        mine = _met(life.setting, life.techniques)
        told.append(not compiles(life.techniques) and not mine <= had)
        if told[-1]:
            had |= mine
    return told
