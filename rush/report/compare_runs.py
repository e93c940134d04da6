"""Several runs side by side: overlaid curves, tokens and time to the same loss, and differences of their recipes. The
contenders of races are compared like runs, with gross and net from their race.

They are compared at a loss that all of them reached: the highest of the final validation losses, or where a run was
never validated, of the final training losses, smoothed. Losses of runs on different data, or with different
objectives, are not comparable; then the page states it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rush.errors import RecipeError
from rush.files import write_atomic
from rush.records.run_series import RunSeries, smoothed
from rush.records.run_status import kind_of
from rush.report import formatting, headlines
from rush.report.compare import letter_of, series_of
from rush.report.compare_races import RacedRecipe, raced_recipes
from rush.report.page import render
from rush.report.panel_svg import pictures
from rush.report.race_words import quotient_words
from rush.report.run_charts import FIGURES, axes, figure_overlay, overlay, validation_overlay
from rush.report.run_page import TONES, small
from rush.report.run_view import RunView, flat, headline, read_run, same

VALIDATED = ("batch.sequence", "run.validate_sequences")
"""Keys on which the held-out text depends, too."""
Place = tuple[int, float, float]
"""Step, tokens, seconds."""


@dataclass(frozen=True)
class ComparedRun:
    """A run, and where it first reached the common loss."""

    letter: str
    series: int
    run: RunView
    reached: Place | None
    against: str = ""
    """The letter of the contender of its race that its gross and net are against."""

    @property
    def row(self) -> dict[str, Any]:
        """The run in numbers, as `--json` prints it."""
        series, final = self.run.series, self.run.series.final_loss()
        step, tokens, seconds = self.reached or (None, None, None)
        raced = {"race": self.run.in_race()} if isinstance(self.run, RacedRecipe) else {}
        return {
            "folder": str(self.run.folder),
            "status": self.run.status,
            "step": series.step,
            "steps": self.run.steps,
            "loss": final[0] if final else None,
            "val_loss": self.run.val_loss,
            "tokens": int(series.tokens),
            "seconds": series.seconds,
            "tokens_per_s": series.tokens / series.seconds if series.seconds else None,
            "to_same_loss": {"step": step, "tokens": tokens, "seconds": seconds},
            **raced,
        }

    def of_race(self, key: str) -> str:
        """Its gross or net against another contender of its race; empty where it was not raced against one."""
        finding = self.run.finding if isinstance(self.run, RacedRecipe) else None
        return f"{quotient_words(finding[key])} of {self.against}" if finding and finding.get(key) else ""

    @property
    def verdict(self) -> str:
        return self.run.verdict if isinstance(self.run, RacedRecipe) else ""


@dataclass(frozen=True)
class RunComparison:
    """Which loss they are compared at, and the runs."""

    target: float | None
    validated: bool
    """Whether it is a validation loss."""
    runs: tuple[ComparedRun, ...]
    differences: tuple[tuple[str, tuple[str, ...]], ...]
    """Keys of the recipes that differ, with every run's value."""

    @property
    def races(self) -> bool:
        """Whether contenders of a race are among them."""
        return any(isinstance(one.run, RacedRecipe) for one in self.runs)

    @property
    def sources(self) -> int:
        """How many folders they come from."""
        return len({one.run.folder.resolve() for one in self.runs})

    @property
    def what(self) -> str:
        return "validation loss" if self.validated else "smoothed training loss"

    @property
    def without_differences(self) -> str:
        """The sentence if no difference was found: it denies differences only if every recipe could be read."""
        lost = [one.letter for one in self.runs if not one.run.recipe]
        if lost:
            return f"Not known: there is no readable recipe.toml of {', '.join(lost)}."
        return "None: all runs have the same recipe."

    @property
    def notes(self) -> list[str]:
        """Reasons why the losses of these runs are hard to compare."""
        keys, found = {key for key, _ in self.differences}, []
        alike = (
            "data.source",
            "data.files",
            "data.tokenizer",
            "data.validation",
            "objective.kind",
            *(VALIDATED * self.validated),
        )
        if other := [key for key in alike if key in keys]:
            found.append(
                f"The runs differ in {', '.join(other)}: their losses may not be losses of the same thing."
            )
        if self.races and len({headlines.machine_name(one.run.machine) for one in self.runs}) > 1:
            found.append(
                "They ran on different machines: times say as much about the machines as about the recipes."
            )
        if self.races and self.sources > 1:
            found.append(
                "Only contenders of one race took turns: gross and net are of one race, and a ratio across folders has no interval."
            )
        return found

    def as_json(self) -> dict[str, Any]:
        return {
            "loss": self.target,
            "kind": self.what,
            "runs": {one.letter: one.row for one in self.runs},
            "differences": {
                key: dict(zip([one.letter for one in self.runs], values, strict=True))
                for key, values in self.differences
            },
            "notes": self.notes,
        }


def compare_runs(folders: Sequence[Path]) -> RunComparison:
    """Read runs and races, and compare all runs and contenders at the same loss."""
    runs = [
        run
        for folder in folders
        for run in (raced_recipes(folder) if kind_of(folder) == "race" else [read_run(folder)])
    ]
    if len(runs) < 2:
        raise RecipeError(
            f"A comparison needs at least two runs, or contenders that made a step; {len(runs)} given. Name another folder."
        )
    validated = all(run.series.validations for run in runs)
    finals = [_falling(run.series, validated)[-1:] for run in runs]
    target = max((one[0][1] for one in finals if one), default=None) if all(finals) else None
    letters = {
        (run.folder, run.contender): letter_of(at)
        for at, run in enumerate(runs)
        if isinstance(run, RacedRecipe)
    }
    return RunComparison(
        target,
        validated,
        tuple(
            ComparedRun(
                letter_of(at),
                series_of(at),
                run,
                _reached(run.series, validated, target),
                letters.get((run.folder, run.finding["against"]), "")
                if isinstance(run, RacedRecipe) and run.finding
                else "",
            )
            for at, run in enumerate(runs)
        ),
        recipe_differences(runs),
    )


def _falling(series: RunSeries, validated: bool) -> list[tuple[Place, float]]:
    """The losses in order: of the validations, or the smoothed ones of the training steps."""
    if validated:
        return [((one.step, one.tokens, one.seconds), one.loss) for one in series.validations]
    has = [bucket for bucket in series.buckets if "loss" in bucket.figures]
    means = smoothed([bucket.figures["loss"].mean for bucket in has])
    return [((one.step, one.tokens, one.seconds), loss) for one, loss in zip(has, means, strict=True)]


def _reached(series: RunSeries, validated: bool, target: float | None) -> Place | None:
    """Where the loss is first at or below the target."""
    if target is None:
        return None
    return next((place for place, loss in _falling(series, validated) if loss <= target), None)


def recipe_differences(runs: Sequence[RunView]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Every key on which the recipes differ, with each run's value."""
    recipes = [flat(run.recipe) for run in runs]
    keys = sorted({key for recipe in recipes for key in recipe if key != "about"})
    rows = [(key, tuple(recipe.get(key, formatting.MISSING) for recipe in recipes)) for key in keys]
    return tuple(row for row in rows if not all(same(row[1][0], value) for value in row[1][1:]))


def write_run_comparison(found: RunComparison, html: Path) -> None:
    """Draw the overlaid runs into one self-contained file."""
    write_atomic(html, run_comparison_page(found))


def run_comparison_page(found: RunComparison) -> str:
    lines = [(one.letter, one.series, one.run.series) for one in found.runs]
    kinds = axes([one.run.series for one in found.runs])
    return render(
        "run_comparison.html",
        title="Recipes side by side" if found.races else "Runs side by side",
        found=found,
        headline=headline,
        machine_name=headlines.machine_name,
        tones=TONES,
        axes=kinds,
        loss=[(axis, pictures(panel)) for axis in kinds if (panel := overlay(lines, axis))],
        validation=[(axis, pictures(panel)) for axis in kinds if (panel := validation_overlay(lines, axis))],
        small=[
            (figure, drawn)
            for figure in FIGURES
            if (drawn := [(axis, small(panel)) for axis in kinds if (panel := figure_overlay(lines, figure, axis))])
        ],
        rows=[(one, one.row) for one in found.runs],
        against=[words_against(found.runs[0], one) for one in found.runs],
    )  # fmt: skip


def words_against(first: ComparedRun, one: ComparedRun) -> str:
    """How much sooner or later than the first run the common loss was reached, by the time of the steps."""
    if (
        one is first
        or first.reached is None
        or one.reached is None
        or not (first.reached[2] and one.reached[2])
    ):
        return ""
    ratio = first.reached[2] / one.reached[2]
    return f"{formatting.ratio(max(ratio, 1 / ratio))} {'sooner' if ratio >= 1 else 'later'}"
