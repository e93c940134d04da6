"""Charts of plans for several devices: predictions by arithmetic, with their error and published measurements.

Each chart plans a family of recipes and gives a record (`rush/records/plan_chart.py`); `rush/report` draws it. Nothing is
measured: the only measurements on a chart are published ones, each with the plan of its own run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from shlex import join
from typing import Any

from rush.errors import RecipeError, nearest
from rush.plan.charts import batches, many_servers, one_server
from rush.plan.charts.options import ChartOptions
from rush.plan.charts.points import Points
from rush.records.plan_chart import FORMAT, PlanChartRecord


@dataclass(frozen=True)
class ChartKind:
    title: str
    about: str
    make: Callable[[ChartOptions, Points], dict[str, Any]]
    takes: tuple[str, ...]
    """Options besides a recipe, its overrides and --machine."""


_ONE = ("devices", "link", "network")
KINDS = {
    "speedup": ChartKind("2, 4 and 8 devices", "tokens per second over devices, ddp and ZeRO-3", one_server.speedup, _ONE),
    "memory": ChartKind("Memory by part over devices", "what shards free, part by part", one_server.memory, _ONE),
    "zero": ChartKind("ZeRO-2 against ZeRO-3", "memory and time of ddp and the stages of ZeRO", one_server.zero, _ONE),
    "links": ChartKind("PCIe against NVLink", "the same layouts over two kinds of links", one_server.links, _ONE),
    "cards": ChartKind("A800 against A100", "two cards that differ in their links, and what 8 make of one", one_server.cards, ("against", *_ONE)),
    "nodes": ChartKind("1 to 512 nodes", "weak and strong scaling over servers", many_servers.nodes, ("nodes", "link", "network")),
    "layouts": ChartKind("405B in four axes", "layouts of tp, cp, pp and shards for a huge model", many_servers.layouts, ("nodes", "link", "network")),
    "batch": ChartKind("Checkpointing into a larger batch", "speed and memory over the micro batch under limits of memory", batches.batch, ()),
}  # fmt: skip
"""All charts, in the order of the page."""


def command_of(name: str, options: ChartOptions) -> str:
    """The command that writes the chart."""
    words = [
        "rush",
        "plan",
        *([options.recipe] if options.recipe else []),
        *options.overrides,
        "--chart",
        name,
    ]
    for option in ("machine", "against", "devices", "nodes", "link", "network"):
        if (value := getattr(options, option)) is not None:
            words += [f"--{option}", str(value)]
    return join(words)


def chart(name: str, options: ChartOptions) -> PlanChartRecord:
    """The record of a chart; RecipeError for an unknown one, or for an option that it does not take."""
    kind = find_chart(name)
    for option in ("against", "devices", "nodes", "link", "network"):
        if getattr(options, option) is not None and option not in kind.takes:
            takes = ", ".join(f"--{one}" for one in ("machine", *kind.takes))
            raise RecipeError(f"the chart {name} does not take --{option}; it takes {takes}.")
    points = Points()
    used = kind.make(options, points)
    return PlanChartRecord(
        format=FORMAT,
        chart=name,
        title=kind.title,
        command=command_of(name, options),
        options=used,
        predicted=points.predicted,
        refused=points.refused,
        published=points.published,
        sources=list(points.sources),
    )


def find_chart(name: str) -> ChartKind:
    if name not in KINDS:
        raise RecipeError(f"there is no chart {name!r}; {nearest(name, [*KINDS, 'all'])}")
    return KINDS[name]


__all__ = ["KINDS", "ChartKind", "ChartOptions", "chart", "command_of", "find_chart"]
