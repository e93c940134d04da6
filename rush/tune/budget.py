"""How long a search may take, what it took so far, and how long the next trial will take.

A trial that was made earlier counts with the time it took then: a search that was interrupted goes on with what it had
left. What trials of a kind took is what the next one is expected to take; compiling is what makes kinds differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

COMPILING_S = 45.0
"""What compiling is expected to add before it was seen."""
MORE = {"rank": 1.0, "confirm": 1.0, "decide": 1.2, "prove": 1.7, "life": 1.0}
"""Of a short trial's time: longer timing, and beside it a profile and steps for parity; two processes of few steps."""
MORE_COMPILED = MORE | {"decide": 1.0, "prove": 1.3}
"""What was compiled for the short trial is found."""

MARGIN = 1.15
"""What a proof may take of another one: recipes differ."""


@dataclass
class Budget:
    total_s: float
    clock: Callable[[], float] = time.monotonic
    trials_s: float = 0.0
    own_s: float = 0.0
    """Clock time of the trials made by this process, which `trials_s` holds, too."""
    reference_s: float = 0.0
    """What tracing plain fp32 and its twin took."""
    walls: dict[frozenset[str], list[float]] = field(default_factory=dict)
    longer: dict[tuple[frozenset[str], str], list[float]] = field(default_factory=dict)
    """Of other kinds of trials than the short ones."""
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
        """A trial was made (or found) that took so long. What failed or was ended early does not say what others will take, unless
        it was to be compiled: then it was too long for that."""
        self.trials_s += wall_s
        self.own_s += elapsed_s
        if trial == "rank" or (trial == "failed" and kind):
            self.walls.setdefault(kind, []).append(wall_s)
        elif trial in MORE:
            self.longer.setdefault((kind, trial), []).append(wall_s)

    def expected_s(self, kind: frozenset[str], trial: str = "rank") -> float:
        """What a trial of this kind will take, from the last few of its kind; a proof or a longer timing from the first that was seen."""
        if known := self.longer.get((kind, trial)):
            return MARGIN * max(known[-3:])
        seen = self.walls.get(kind)
        if not seen:
            plain = self.walls.get(frozenset())
            others = [walls[-1] for walls in self.walls.values()]
            guess = plain[-1] if plain else max(others, default=0.0)
            seen = [guess + (COMPILING_S if kind and guess < COMPILING_S else 0.0)]
        more = 0.5 * self.reference_s if trial == "prove" else 0.0
        return (MORE_COMPILED if kind else MORE)[trial] * max(seen[-3:]) + more
