"""The end of a search: who wins where the best is not proved."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rush.tune.finals import proved


def candidate(name: str, proved: bool | None) -> Any:
    """One that was held against plain fp32 before (`proved` says how it went), or has yet to be."""
    results = {} if proved is None else {"prove": proved}
    return SimpleNamespace(key=name, known_recipe=name, results=results, reason="", life=None)


def search(base: Any, sound: set[str], affordable: bool, broken: frozenset[str] = frozenset()) -> Any:
    def live(one: Any) -> bool:
        one.life = {"verdict": "broken" if one.key in broken else "ok", "problem": "it cannot"}
        return one.key not in broken

    return SimpleNamespace(
        base=base,
        outlook=SimpleNamespace(suspect=lambda recipe: False, breaks=lambda recipe: frozenset()),
        affordable=lambda kind, recipe, reserve: affordable,
        prove=lambda one: one.key in sound,
        without_idle=lambda one: None,
        live=live,
        without_broken=lambda one: None,
    )


def test_without_time_for_another_proof_one_that_was_proved_before_wins() -> None:
    base, lead = candidate("unchanged", None), candidate("lead, of which a part does nothing", None)
    unproved, before = candidate("near it", None), candidate("the first jump", True)
    places = [lead, unproved, before, base]
    sound = {"near it", "the first jump"}
    assert proved(search(base, sound, affordable=False), places) is before
    assert proved(search(base, sound, affordable=True), places) is unproved
    assert proved(search(base, set(), affordable=True), places) is None
    assert proved(search(base, sound, affordable=True, broken=frozenset({"near it"})), places) is before


def test_a_candidate_no_better_than_the_unchanged_recipe_does_not_win() -> None:
    base, slower = candidate("unchanged", None), candidate("slower", True)
    assert proved(search(base, {"slower"}, affordable=True), [base, slower]) is None
    broken = frozenset({"unchanged"})
    assert proved(search(base, {"slower"}, affordable=True, broken=broken), [base, slower]) is slower
