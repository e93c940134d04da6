"""The candidates of a search, and its trials on a timeline."""

from __future__ import annotations

from dataclasses import dataclass, field

from rush.recipe import Recipe
from rush.records.life import LifeRecord
from rush.tune.forecast import Prediction
from rush.tune.goal import TuneResult
from rush.tune.moves import MoveKind


@dataclass
class Candidate:
    """A recipe that was considered, and its result."""

    key: str
    recipe: Recipe | None
    state: str
    """One of `rush.records.tune.STATES`."""
    reason: str = ""
    over: str = ""
    prediction: Prediction | None = None
    expected: float | None = None
    ratio: float | None = None
    """Measured, over the lead at that time."""
    round: int = 0
    """1 ranked, 2 timed longer, 3 compared with plain fp32."""
    at_s: float = 0.0
    """When it was considered, in seconds of the search."""
    results: dict[str, TuneResult] = field(default_factory=dict)
    """Successful trials, by kind."""
    life: LifeRecord | None = None
    kind: MoveKind | None = None
    """None for a candidate that was not tried."""

    @property
    def known_recipe(self) -> Recipe:
        """The recipe of a candidate that was, or will be, tried."""
        assert self.recipe is not None, self.key
        return self.recipe

    @property
    def best(self) -> TuneResult:
        """Its longest successful trial."""
        return next(self.results[kind] for kind in ("prove", "decide", "rank") if kind in self.results)

    @property
    def timed(self) -> bool:
        return bool(self.results)


@dataclass(frozen=True)
class Event:
    """One trial on the timeline."""

    candidate: str
    kind: str
    began_s: float
    wall_s: float
    status: str
