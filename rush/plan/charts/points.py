"""Plans as points of a chart, and published runs with the plan of the same run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rush.errors import RecipeError
from rush.parallel import AXES
from rush.plan.describe import describe
from rush.plan.memory import memory_of
from rush.plan.micro_batch import with_chosen_micro
from rush.plan.planning import Plan, plan, unmet
from rush.plan.published_runs import PublishedRun, read_published
from rush.plan.spec import spec_of
from rush.plan.target import TargetMachine, target_of, with_memory_limit
from rush.recipe import Recipe
from rush.recipe_io import changed
from rush.records.plan_chart import PredictedPoint, PublishedPoint, RefusedPoint


@dataclass
class Points:
    """The points of a chart, in order of request."""

    predicted: list[PredictedPoint] = field(default_factory=list)
    refused: list[RefusedPoint] = field(default_factory=list)
    published: list[PublishedPoint] = field(default_factory=list)
    sources: dict[str, None] = field(default_factory=dict)

    def plan(
        self,
        recipe: Recipe,
        target: TargetMachine,
        series: str,
        x: float,
        *,
        group: str = "",
        name: str = "",
        **changes: Any,
    ) -> PredictedPoint | None:
        """Plan a recipe with some keys changed; a recipe that cannot be planned is a point with its reason."""
        try:
            chosen = changed(recipe, {key.replace("__", "."): value for key, value in changes.items()})
            limited = with_memory_limit(target, chosen.run.memory_limit_gb)
            chosen = with_chosen_micro(chosen, limited)
            found = plan(
                spec_of(chosen, limited.kind), limited, limits=False, problems=unmet(chosen, limited)
            )
        except RecipeError as error:
            self.refused.append(
                RefusedPoint(series=series, group=group, x=float(x), name=name or series, reason=str(error))
            )
            return None
        self.sources |= dict.fromkeys(found.sources)
        point = predicted(found, series, x, group, name)
        self.predicted.append(point)
        return point

    def publish(self, runs: Iterable[PublishedRun], series: str, *, group: str = "", per: int = 1) -> None:
        """Published runs over their devices, or over nodes of `per` devices."""
        for run in runs:
            found = plan(run.spec, run.target, limits=False)
            x = max(1.0, run.spec.world / per)
            self.published.append(
                PublishedPoint(
                    name=run.name,
                    series=series,
                    group=group,
                    x=x,
                    source=run.source,
                    devices=run.spec.world,
                    tokens_per_s=run.tokens_per_s * run.spec.world,
                    memory_bytes=run.memory_bytes,
                    planned=predicted(found, series, x, group, run.name),
                    planned_reserved_bytes=memory_of(run.spec).reserved,
                )
            )


def predicted(found: Plan, series: str, x: float, group: str = "", name: str = "") -> PredictedPoint:
    return PredictedPoint(
        series=series,
        group=group,
        x=float(x),
        name=name or describe(found.spec),
        machine=found.target.key,
        devices=found.spec.world,
        layout={axis: found.spec.size(axis) for axis in AXES if found.spec.size(axis) > 1},
        tokens_per_s=found.tokens_per_s,
        mfu=found.mfu,
        step_tokens=found.spec.step_tokens,
        time_s=dict(found.time.parts),
        memory_bytes={part: int(value) for part, value in found.memory.parts.items()},
        needed_bytes=found.life.total,
        room_bytes=found.target.memory_bytes,
        fits=found.fits,
        tight=found.tight,
        problems=list(found.problems),
        expected_error={"memory": found.expected_error["memory"], "time": found.expected_error["time"]},
        how=found.target.how,
    )


def published_of(*beginnings: str, study: Sequence[str] = ()) -> list[PublishedRun]:
    """Published runs whose names begin so, of these studies, by their number of devices."""
    found = [
        run
        for run in read_published()
        if run.name.startswith(beginnings) and (not study or run.study in study)
    ]
    return sorted(found, key=lambda run: run.spec.world)


def machine(key: str, devices: int, link: str | None = None, network: str | None = None) -> TargetMachine:
    """A number of accelerators of one kind in their usual servers."""
    per_node = target_of(key).devices_per_node
    if devices <= per_node:
        return target_of(key, devices, None, link, network)
    if devices % per_node:
        raise RecipeError(
            f"{devices} devices are no whole number of servers of {per_node} {key}; give a multiple of {per_node}."
        )
    return target_of(key, per_node, devices // per_node, link, network)


def sharded(stage: str) -> Mapping[str, str]:
    """fsdp as a technique, at a ZeRO stage."""
    return {"name": "fsdp", "stage": stage}
