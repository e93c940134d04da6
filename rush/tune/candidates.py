"""What a search keeps of a recipe it thought of, and of each trial on its time line."""

from __future__ import annotations

from dataclasses import dataclass, field

from rush.recipe import Recipe
from rush.records.life import LifeRecord
from rush.tune.forecast import Prediction
from rush.tune.goal import TuneResult


@dataclass
class Candidate:
    """A recipe that was thought of, and what became of it."""

    key: str
    recipe: Recipe | None
    state: str
    """One of `rush.records.tune.STATES`."""
    reason: str = ""
    over: str = ""
    prediction: Prediction | None = None
    expected: float | None = None
    ratio: float | None = None
    """Measured, over the lead of that time."""
    round: int = 0
    """How far it came: 1 ranked, 2 timed longer, 3 held against plain fp32."""
    at_s: float = 0.0
    """When it was thought of, in seconds of the search."""
    results: dict[str, TuneResult] = field(default_factory=dict)
    """Trials that gave figures, by kind."""
    life: LifeRecord | None = None
    """Lived by those that may win."""

    @property
    def known_recipe(self) -> Recipe:
        """The recipe of one that was, or will be, tried."""
        assert self.recipe is not None, self.key
        return self.recipe

    @property
    def best(self) -> TuneResult:
        """The longest trial of it that gave figures."""
        return next(self.results[kind] for kind in ("prove", "decide", "rank") if kind in self.results)

    @property
    def timed(self) -> bool:
        return bool(self.results)


@dataclass(frozen=True)
class Event:
    """One trial on the time line."""

    candidate: str
    kind: str
    began_s: float
    wall_s: float
    status: str
