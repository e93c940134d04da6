"""`rush plan --chart`: plans over devices, links, GPU models, nodes, layouts and batches, as a record, a page and a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rush.cli.options import is_override
from rush.cli.output import next_step, print_json, print_table, say
from rush.errors import RecipeError

if TYPE_CHECKING:
    from rush.records.plan_chart import PlanChartRecord


def complete_chart(incomplete: str) -> list[str]:
    from rush.records.plan_chart import CHARTS

    return [name for name in (*CHARTS, "all") if name.startswith(incomplete)]


def draw(
    chart: str,
    recipe: str | None,
    overrides: Sequence[str],
    options: Mapping[str, Any],
    out: Path | None,
    json: bool,
    refused: Mapping[str, bool],
) -> None:
    from rush.api import plan_chart
    from rush.plan.charts import KINDS, find_chart

    if found := [option for option, given in refused.items() if given]:
        raise RecipeError(f"--chart cannot be combined with {', '.join(found)}; leave out one or the other.")
    if recipe is not None and is_override(recipe):
        overrides, recipe = [recipe, *overrides], None
    names = list(KINDS) if chart == "all" else [chart]
    for name in names:
        find_chart(name)
    given = any(value is not None for value in options.values())
    if chart == "all" and (given or recipe or overrides):
        raise RecipeError(
            "--chart all draws every chart with its defaults; name one chart to give it a recipe or options."
        )
    records = {}
    for name in names:
        folder = (out / name if out and chart == "all" else out) or Path("runs") / f"plan-{name}"
        record = plan_chart(name, recipe, *overrides, **options, out=folder)
        records[name] = record
        if not json:
            _show(record, folder)
    if json:
        print_json(records if chart == "all" else records[chart])
    else:
        next_step("rush", "plan", "--check", why="the planner against every measurement")


def _show(record: PlanChartRecord, folder: Path) -> None:
    from rush.report.plan_chart import COLUMNS, rows
    from rush.report.plan_words import sentences

    typer.secho(f"{record['title']}, planned", bold=True)
    print_table(list(COLUMNS), [list(row) for row in rows(record)])
    typer.echo("")
    for sentence in sentences(record):
        say(sentence)
    typer.echo(f"Record: {folder / 'plan-chart.json'}\nReport: {folder / 'report.html'}\n")
