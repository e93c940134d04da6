"""Predictions of the planner, from rates measured on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from rush.errors import RushError
from rush.plan.planning import plan
from rush.plan.spec import matmul_dtypes_of, spec_of
from rush.plan.target import TargetMachine
from rush.recipe import Recipe


@dataclass(frozen=True)
class Prediction:
    tokens_per_s: float
    memory_bytes: float
    limit_bytes: float
    longest_sequence: int = 0
    doubtful: bool = False
    """A matmul dtype has no measured rate here: worth a trial, but not a base for further predictions."""

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.limit_bytes


class Planner:
    """Cached predictions for one machine."""

    def __init__(self, target: TargetMachine) -> None:
        self.target = target
        self._known: dict[tuple[str, bool], Prediction | str] = {}

    def predict(self, recipe: Recipe, *, limits: bool = False) -> Prediction | str:
        """The prediction for a recipe, or the message with which the planner refuses it. `limits`: also the longest sequence."""
        at = recipe.digest, limits
        if at not in self._known:
            self._known[at] = self._planned(recipe, limits)
        return self._known[at]

    def _planned(self, recipe: Recipe, limits: bool) -> Prediction | str:
        try:
            spec = spec_of(recipe, self.target.kind)
            found = plan(spec, self.target, limits=limits)
        except RushError as error:
            return str(error)
        if not found.host_fits:
            there = (self.target.host_bytes or 0.0) / 2**30
            return f"predicted {found.on_host / 2**30:.3g} GiB on the host, which has {there:.3g}"
        own = recipe.run.memory_limit_gb
        limit = self.target.memory_bytes if own is None else min(own * 1e9, self.target.memory_bytes)
        doubtful = not set(matmul_dtypes_of(spec)) <= set(self.target.matmul)
        return Prediction(found.tokens_per_s, found.memory.total, limit, found.longest_sequence, doubtful)
