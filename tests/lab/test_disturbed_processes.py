"""A rung with a disturbed process is measured again, a bounded number of times, and its record says so."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rush.lab.ladder.climb import MOST_AGAIN, Climb, needs_another
from rush.lab.ladder.findings import RungState, disturbed_of
from rush.lab.trial.trial import Outcome


def _outcome(rate: float) -> Outcome:
    timing = {"step_tokens": 1, "samples_s": [1 / rate] * 5, "peak_memory_bytes": 1}
    return Outcome("ok", None, {"timing": timing}, wall_s=2.0)  # type: ignore[typeddict-item]


class _Silent(Climb):
    def _report(self, doing: str | None) -> Any:
        return None


def _climb(processes: int, later: Sequence[float], tmp_path: Path) -> tuple[_Silent, list[str]]:
    """A climb whose further trials come to these rates, and the names of the trials it makes."""
    rates, made = iter(later), []

    def run(recipe: Any, kind: str, *, first: bool = False) -> Outcome:
        made.append(kind)
        return _outcome(next(rates))

    bench: Any = SimpleNamespace(
        plan=SimpleNamespace(additions=[], measure=SimpleNamespace(processes=processes)),
        known=lambda recipe, kind: None,
        run=run,
        life=lambda recipe: {"verdict": "ok", "problem": None, "parts": []},
        seconds=[],
    )
    return _Silent(bench, "cumulative", tmp_path, lambda progress: None), made


@pytest.mark.parametrize(
    ("rates", "later", "made", "found"),
    [
        ([100, 101, 99], [], [], None),
        ([100, 60, 99], [101], ["time-3"], 1),
        ([100, 60], [101], ["time-2"], 1),
        ([100, 96], [], [], None),
        ([100], [], [], None),
        # Slow again: that is how the recipe runs, and nothing is left out.
        ([100, 60, 99], [61], ["time-3"], None),
        # Never quiet: two further processes and no more.
        ([100, 60], [80, 70], ["time-2"], None),
    ],
)
def test_a_disturbed_process_is_replaced_by_another(
    rates: list[float], later: list[float], made: list[str], found: int | None, tmp_path: Path
) -> None:
    climb, ran = _climb(len(rates), later, tmp_path)
    recipe: Any = SimpleNamespace(digest="0" * 16)
    state = RungState(None, "base", "base", recipe, list(map(_outcome, rates)))
    climb.states = [state]
    climb._replace_disturbed(state)
    assert ran == made
    told = disturbed_of(state)
    assert (told["process"] if told else None) == found
    assert state.num_again == len(made)
    if told:
        assert told["again"] == len(made)
    assert climb._trials_s() == pytest.approx(2.0 * (len(rates) + len(made)))


def test_however_disturbed_a_rung_is_it_is_measured_again_at_most_so_many_times(tmp_path: Path) -> None:
    climb, ran = _climb(9, [100.0] * 9, tmp_path)
    recipe: Any = SimpleNamespace(digest="0" * 16)
    state = RungState(None, "base", "base", recipe, list(map(_outcome, (100, 60, 99))))
    assert needs_another(state.processes, 9)
    climb._replace_disturbed(state)
    assert len(ran) == MOST_AGAIN
