"""The page of a run: its status, curves over steps, tokens and time, samples, recipe. One self-contained file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from markupsafe import Markup

from rush.report import formatting, headlines
from rush.report.headlines import HeadlineFigure
from rush.report.page import flattened, render
from rush.report.panel_svg import draw, pictures
from rush.report.panels import Curves
from rush.report.run_charts import FIGURES, axes, figure_panel, loss_panel
from rush.report.run_view import RunView, headline, ready_recipe, recipe_changes, warnings
from rush.report.svg import picture

SMALL_WIDTH = 340.0
"""Width of panels side by side."""
TONES = {
    "finished": ("good", "dot"),
    "running": ("plain", "up"),
    "interrupted": ("caution", "barred"),
    "stale": ("caution", "clock"),
    "failed": ("bad", "cross"),
}
Complete = Callable[[str], Mapping[str, Any]]
"""A ready recipe by name, with its defaults written out."""


def run_page(run: RunView, complete: Complete | None = None) -> str:
    series = run.series
    ready = ready_recipe(run.recipe)
    kinds = axes([series])
    return render(
        "run.html",
        title=f"{run.name} · run",
        run=run,
        headline=headline(run),
        warnings=warnings(run),
        tone=TONES[run.status],
        figures=_figures(run),
        machine=headlines.machine_name(run.machine),
        machine_rows=flattened(run.machine),
        axes=kinds,
        loss=[(axis, pictures(panel)) for axis in kinds if (panel := loss_panel(series, axis))],
        small=[
            (figure, drawn)
            for figure in FIGURES
            if (
                drawn := [
                    (axis, small(panel)) for axis in kinds if (panel := figure_panel(series, figure, axis))
                ]
            )
        ],
        ready=ready,
        changes=recipe_changes(run.recipe, complete(ready) if ready and complete else None),
        named_only=complete is None,
    )


def small(panel: Curves) -> Markup:
    """A panel for a column of three."""
    drawn = draw(panel, SMALL_WIDTH)
    return picture(
        drawn.alt, *drawn.marks, class_="curve-picture", viewBox=f"0 0 {drawn.width:g} {drawn.height:g}"
    )


def _figures(run: RunView) -> list[HeadlineFigure]:
    """The large numbers under the headline."""
    series, found = run.series, []
    if series.validations:
        best = min(series.validations, key=lambda one: one.loss)
        last, note = series.validations[-1].loss, f"best {best.loss:.4f} at step {best.step}"
        found.append(HeadlineFigure(f"{last:.4f}", "validation loss", note))
    if (final := series.final_loss()) is not None:
        note = f"mean of the last {formatting.plural(final[1], 'step')}"
        found.append(HeadlineFigure(f"{final[0]:.4f}", "training loss", note))
    found.append(
        HeadlineFigure(formatting.si(series.tokens), "tokens", formatting.plural(series.step, "step"))
    )
    if series.seconds > 0 and series.tokens > 0:
        speed = formatting.si(series.tokens / series.seconds)
        found.append(HeadlineFigure(speed, "tokens per second", "over all steps"))
        took = formatting.seconds(series.seconds)
        found.append(HeadlineFigure(took, "training time", "sum of the step times"))
    for key, name in (("mfu", "MFU"), ("ceiling_fraction", "of the measured ceiling")):
        values = [one.figures[key] for one in series.buckets if key in one.figures]
        if values:
            mean = sum(one.total for one in values) / sum(one.count for one in values)
            found.append(HeadlineFigure(formatting.share(mean), name, "mean of all steps"))
    if series.peak_memory_bytes:
        most = formatting.size(series.peak_memory_bytes)
        found.append(HeadlineFigure(most, "memory", "most after any step"))
    return found
