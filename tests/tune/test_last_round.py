"""The last comparison of a search: what was proved against the recipe as it was given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rush.tune import finals
from tests.tune.test_finals import candidate, search


def last_round(ratio: float, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any, Any]:
    """The base, a proved candidate that is `ratio` times as fast, and who wins."""
    base, proved = candidate("unchanged", True), candidate("proved", True)
    base.best, proved.best = 1.0, ratio
    made = search(base, {"unchanged", "proved"}, affordable=True)
    made.goal = SimpleNamespace(ratio=lambda new, old: new / old)
    made.run = lambda kind, one: None
    monkeypatch.setattr(finals, "gain", lambda before, after: after / before)
    return base, proved, finals._compared(made, proved)


def test_what_is_slower_than_the_unchanged_recipe_after_all_does_not_win(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base, proved, winner = last_round(0.97, monkeypatch)
    assert winner is base
    assert (proved.state, proved.reason) == ("lost", "lost the last round: 0.97× of the original recipe")


def test_what_is_faster_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    _, proved, winner = last_round(1.25, monkeypatch)
    assert winner is proved
    assert winner.reason == "1.25× of the original recipe"
