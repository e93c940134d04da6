"""The time of a search: its budget, what it spent, and how long the next trial is expected to take.

Trials of an interrupted search count with the time they took then. A trial is expected to take as long as the last ones of its
kind; kinds differ by what they compile.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rush.errors import RecipeError

COMPILING_S = 45.0
"""Expected time of compiling, before it was measured."""
MORE = {"rank": 1.0, "confirm": 1.0, "decide": 1.2, "prove": 1.7, "life": 1.0}
"""Time of each kind over that of a short trial."""
MORE_COMPILED = MORE | {"decide": 1.0, "prove": 1.3}
"""The compiler's cache is warm from the short trial."""

LONGEST_S = 366 * 86_400.0
MARGIN = 1.15
"""Factor on the time of an earlier trial of the kind: recipes differ."""


def seconds(budget: float | str) -> float:
    """Seconds from 90s, 20m or 1.5h; a bare number is seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h)?", str(budget).strip())
    value = float(found[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600}[found[2] or "s"] if found else 0.0
    if not 0 < value <= LONGEST_S:
        raise RecipeError(
            f"--budget is {budget!r}; allowed: a time above zero and up to a year, as in 90s, 20m or 1h."
        )
    return value


@dataclass
class Budget:
    total_s: float
    clock: Callable[[], float] = time.monotonic
    trials_s: float = 0.0
    own_s: float = 0.0
    """Clock time of the trials of this process, included in `trials_s`."""
    reference_s: float = 0.0
    """Time of tracing plain fp32 and its perturbed run."""
    curve_s: float = 0.0
    """Expected time of plain fp32 on the timed batches, which the first proof needs too; 0 once it was run."""
    walls: dict[frozenset[str], list[float]] = field(default_factory=dict)
    longer: dict[tuple[frozenset[str], str], list[float]] = field(default_factory=dict)
    """Times of trials other than the short ones."""
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.clock()

    @property
    def spent_s(self) -> float:
        return self.trials_s + (self.clock() - self.began - self.own_s)

    @property
    def left_s(self) -> float:
        return self.total_s - self.spent_s

    def note(self, kind: frozenset[str], wall_s: float, elapsed_s: float, trial: str) -> None:
        """Count a trial. One that failed or was ended early predicts no other, unless it compiled: then it shows how long that takes."""
        self.trials_s += wall_s
        self.own_s += elapsed_s
        if trial == "rank" or (trial == "failed" and kind):
            self.walls.setdefault(kind, []).append(wall_s)
        elif trial in MORE:
            self.longer.setdefault((kind, trial), []).append(wall_s)

    def expected_s(self, kind: frozenset[str], trial: str = "rank") -> float:
        """Expected time of a trial, from the last few of its kind."""
        if known := self.longer.get((kind, trial)):
            return MARGIN * max(known[-3:]) + (self.curve_s if trial == "prove" else 0.0)
        seen = self.walls.get(kind)
        if not seen:
            plain = self.walls.get(frozenset())
            others = [walls[-1] for walls in self.walls.values()]
            guess = plain[-1] if plain else max(others, default=0.0)
            seen = [guess + (COMPILING_S if kind and guess < COMPILING_S else 0.0)]
        more = 0.5 * self.reference_s + self.curve_s if trial == "prove" else 0.0
        return (MORE_COMPILED if kind else MORE)[trial] * max(seen[-3:]) + more
