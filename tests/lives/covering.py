"""A covering array: few recipes in which every allowed pair of techniques occurs.

n techniques have n² / 2 pairs, but a recipe of k techniques holds k² / 2 of them at once. So a few dozen recipes cover what
hundreds would, if each takes in as many of the missing pairs as the check allows. What a large recipe can do is mask a
failure (one technique takes the seam that another would have broken at), so the pairs also run alone (`make test-all`), and a
recipe that fails is taken apart until nothing can be left out.

Nothing here knows recipes: an item is anything that can be sorted and hashed, and `allowed` says which sets may stand together.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

Item = Any
Items = frozenset[Item]
Allowed = Callable[[Items], bool]


def smallest(wanted: Iterable[Item], items: Sequence[Item], allowed: Allowed) -> Items | None:
    """The wanted items, with one more where the check asks for company; None where that does not help."""
    wanted = frozenset(wanted)
    if allowed(wanted):
        return wanted
    return next((wanted | {more} for more in items if allowed(wanted | {more})), None)


def allowed_pairs(
    items: Sequence[Item], allowed: Allowed, apart: Callable[[Item, Item], bool]
) -> dict[Items, Items]:
    """Every pair that may stand together, with the smallest allowed set that holds it. `apart`: no company helps these two."""
    pairs = (pair for pair in combinations(sorted(items), 2) if not apart(*pair))
    found = {frozenset(pair): smallest(pair, items, allowed) for pair in pairs}
    return {pair: whole for pair, whole in found.items() if whole is not None}


def covering(
    wanted: Mapping[Items, Items], items: Sequence[Item], allowed: Allowed, seed: int = 0
) -> Iterator[Items]:
    """Allowed sets, until every key of `wanted` lies in one of them; the value of a key is an allowed set that holds it.

    Each begins with a key that is missing and takes in, again and again, the item that covers most of those still missing.
    """
    order = sorted(items)
    random.Random(seed).shuffle(order)
    missing = set(wanted)
    while missing:
        start = max(missing, key=lambda key: (len(missing_beside(key, missing)), sorted(key)))
        chosen, left = wanted[start], list(order)
        while True:
            gains = [(_gain(chosen, item, missing), item) for item in left if item not in chosen]
            gains = sorted([(gain, item) for gain, item in gains if gain], key=lambda pair: -pair[0])
            fitting = next((item for _, item in gains if allowed(chosen | {item})), None)
            if fitting is None:
                break
            # What does not fit now will not fit a larger set either, save for the few that wait for company.
            chosen |= {fitting}
        missing -= {key for key in missing if key <= chosen}
        yield chosen


def missing_beside(key: Items, missing: Collection[Items]) -> list[Items]:
    """The missing ones that share an item with this one."""
    return [other for other in missing if other & key]


def _gain(chosen: Items, item: Item, missing: Collection[Items]) -> int:
    """How many of the missing ones `item` would complete."""
    grown = chosen | {item}
    return sum(1 for key in missing if item in key and key <= grown)


def shrunk(whole: Items, fails: Callable[[Items], bool], allowed: Allowed, limit_s: float) -> Items:
    """The smallest subset that still fails, as far as time allows: halves are taken out first, then items one by one."""
    began, width = time.monotonic(), max(1, len(whole) // 2)
    while True:
        parts = sorted(whole)
        pieces = [frozenset(parts[at : at + width]) for at in range(0, len(parts), width)]
        for piece in pieces:
            if time.monotonic() - began > limit_s:
                return whole
            if piece < whole and allowed(whole - piece) and fails(whole - piece):
                whole -= piece
        if width == 1:
            return whole
        width = max(1, width // 2)
